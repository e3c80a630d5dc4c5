// Products with packed weights. Each panel is read from memory once per item and, where it is not float32, decoded into a
// buffer that stays in the first-level cache while all rows of the item pass over it.
#pragma once

#include "tile.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

constexpr int64_t kDepth = 256;  // inputs of a panel that are worked on at a time: 16 KiB of float32

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- a group of inputs of one panel, as float32 values: kInputs at a step, of vector `v` of the 16 columns
template <typename T>
struct FloatGroup {
  static constexpr int kInputs = 1;
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);
  const T* data;

  FloatGroup(const MatmulArgs& a, int64_t at) : data(static_cast<const T*>(a.data) + at) {}
  void values(int step, int v, Vec* out) const { out[0] = load(data + step * kPanel + v * kLanes); }
};

// Scale and offset of a group, 16 columns.
struct Affine {
  Vec scale[kPanelVecs];
  Vec offset[kPanelVecs];

  Affine(const MatmulArgs& a, int64_t at) {
    int64_t group = at / kGroup;
    for (int v = 0; v < kPanelVecs; v++) {
      scale[v] = load(reinterpret_cast<const Float16*>(a.scale) + group + v * kLanes);
      offset[v] = a.offset == nullptr ? Vec{} : load(reinterpret_cast<const Float16*>(a.offset) + group + v * kLanes);
    }
  }
};

struct Int8Group {
  static constexpr int kInputs = 1;
  static constexpr bool kInPlace = false;
  Affine affine;
  const int8_t* data;

  Int8Group(const MatmulArgs& a, int64_t at) : affine(a, at), data(static_cast<const int8_t*>(a.data) + at) {}
  void values(int step, int v, Vec* out) const {
    out[0] = load(data + step * kPanel + v * kLanes) * affine.scale[v] + affine.offset[v];
  }
};

struct Int4Group {
  static constexpr int kInputs = 2;
  static constexpr bool kInPlace = false;
  Affine affine;
  const uint8_t* data;

  Int4Group(const MatmulArgs& a, int64_t at) : affine(a, at), data(static_cast<const uint8_t*>(a.data) + at / 2) {}
  void values(int step, int v, Vec* out) const {
    Ints pair = load_octets(data + step * kPanel + v * kLanes);
    out[0] = to_float(pair & 15) * affine.scale[v] + affine.offset[v];
    out[1] = to_float(pair >> 4) * affine.scale[v] + affine.offset[v];
  }
};

// Inputs [begin, begin + count) of a panel, decoded into `out`.
template <typename Group>
void decode(const MatmulArgs& a, int64_t panel, int64_t begin, int64_t count, float* out) {
  for (int64_t first = 0; first < count; first += kGroup) {
    Group group(a, (panel * a.depth + begin + first) * kPanel);
    int steps = static_cast<int>(least(kGroup, count - first)) / Group::kInputs;
    for (int step = 0; step < steps; step++)
      for (int v = 0; v < kPanelVecs; v++) {
        Vec values[Group::kInputs];
        group.values(step, v, values);
        for (int i = 0; i < Group::kInputs; i++)
          store(out + (first + step * Group::kInputs + i) * kPanel + v * kLanes, values[i]);
      }
  }
}

// One row: values go from registers into sums, in the order of `multiply` and with its result.
template <typename Group, int kPanels>
void multiply_row(const MatmulArgs& a, int64_t row, int64_t panel) {
  Vec sums[kPanels][kPanelVecs] = {};
  const float* x = a.x + row * a.depth;
  for (int64_t begin = 0; begin < a.depth; begin += kGroup) {
    int steps = static_cast<int>(least(kGroup, a.depth - begin)) / Group::kInputs;
    const Group first(a, (panel * a.depth + begin) * kPanel);
    const Group last(a, ((panel + kPanels - 1) * a.depth + begin) * kPanel);
    for (int step = 0; step < steps; step++)
      for (int p = 0; p < kPanels; p++)
        for (int v = 0; v < kPanelVecs; v++) {
          Vec values[Group::kInputs];
          (p == 0 ? first : last).values(step, v, values);
          for (int i = 0; i < Group::kInputs; i++) sums[p][v] += values[i] * x[begin + step * Group::kInputs + i];
        }
  }
  for (int p = 0; p < kPanels; p++)
    for (int v = 0; v < kPanelVecs; v++) store(a.out + row * a.size_out + (panel + p) * kPanel + v * kLanes, sums[p][v]);
}

// ---- rows of an item
struct Block {
  int64_t row, rows;      // of x and out
  int64_t panel, panels;  // 1, 2 or 4 panels, none of them ragged but a single one
  int64_t begin, count;   // inputs
  const float* weights;   // [panels, stride]
  int64_t stride;
  int64_t width;          // columns of a panel that exist
  const char* next;       // what follows the block's weights in memory
  int64_t bytes;          // size of the block's weights there
};

inline int64_t bytes_of(Type type, int64_t count) {
  return type == Type::kFloat32 ? 4 * count : type == Type::kInt8 ? count : type == Type::kInt4 ? count / 2 : 2 * count;
}

// Add a block's products to `out`, or store them if they are the first.
inline void multiply_block(const MatmulArgs& a, const Block& b) {
  alignas(64) float edge[kTileRows * kPanel];
  int64_t tiles = (b.rows + kTileRows - 1) / kTileRows;
  int64_t step = b.bytes / (b.count * tiles);
  const char* ahead = b.next;
  int rows;
  for (int64_t row = b.row; row < b.row + b.rows; row += rows, ahead += b.count * step) {
    rows = next_rows(b.row + b.rows - row);
    float* out = a.out + row * a.size_out + b.panel * kPanel;
    Tile tile = {a.x + row * a.depth + b.begin, a.depth, b.weights, b.stride, b.count, out, a.size_out, b.begin > 0, ahead, step};
    if (b.width == kPanel) {
      multiply_tile(tile, rows, static_cast<int>(b.panels));
      continue;
    }
    tile.out = edge;
    tile.out_stride = kPanel;
    size_t bytes = static_cast<size_t>(b.width) * sizeof(float);
    for (int r = 0; tile.add && r < rows; r++) memcpy(edge + r * kPanel, out + r * a.size_out, bytes);
    multiply_tile(tile, rows, 1);
    for (int r = 0; r < rows; r++) memcpy(out + r * a.size_out, edge + r * kPanel, bytes);
  }
}

// Rows [row, row + rows) times panels [panel, end).
template <typename Group>
void multiply_panels(const MatmulArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t end) {
  int64_t whole = least(end, a.size_out / kPanel);
  alignas(64) float buffer[kDepth * kPanel];
  for (int64_t panels; panel < end; panel += panels) {
    if (rows == 1 && !Group::kInPlace && panel < whole) {
      panels = panel + 2 <= whole ? 2 : 1;
      if (panels == 2) {
        multiply_row<Group, 2>(a, row, panel);
      } else {
        multiply_row<Group, 1>(a, row, panel);
      }
      continue;
    }
    panels = tile_panels(next_rows(rows));
    while (panels > 1 && panel + panels > whole) panels /= 2;
    int64_t depth = Group::kInPlace ? kDepth : kDepth / panels;
    for (int64_t begin = 0; begin < a.depth; begin += depth) {
      int64_t count = least(depth, a.depth - begin);
      int64_t width = least(kPanel, a.size_out - panel * kPanel);
      const char* data = static_cast<const char*>(a.data) + bytes_of(a.type, (panel * a.depth + begin) * kPanel);
      int64_t bytes = bytes_of(a.type, count * kPanel);
      Block block = {row, rows, panel, panels, begin, count, buffer, count * kPanel, width, data + bytes, bytes};
      if (Group::kInPlace) {
        block.weights = reinterpret_cast<const float*>(data);
        block.stride = a.depth * kPanel;
      } else {
        for (int64_t p = 0; p < panels; p++) decode<Group>(a, panel + p, begin, count, buffer + p * block.stride);
      }
      multiply_block(a, block);
    }
  }
}

void matmul(const MatmulArgs& a, int64_t item) {
  int64_t row_items = (a.rows + a.item_rows - 1) / a.item_rows;
  int64_t row = item % row_items * a.item_rows;
  int64_t rows = least(a.item_rows, a.rows - row);
  int64_t panel = item / row_items * a.item_panels;
  int64_t end = least(panel + a.item_panels, a.panels);
  switch (a.type) {
    case Type::kFloat32: return multiply_panels<FloatGroup<float>>(a, row, rows, panel, end);
    case Type::kBFloat16: return multiply_panels<FloatGroup<BFloat16>>(a, row, rows, panel, end);
    case Type::kFloat16: return multiply_panels<FloatGroup<Float16>>(a, row, rows, panel, end);
    case Type::kInt8: return multiply_panels<Int8Group>(a, row, rows, panel, end);
    case Type::kInt4: return multiply_panels<Int4Group>(a, row, rows, panel, end);
  }
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
