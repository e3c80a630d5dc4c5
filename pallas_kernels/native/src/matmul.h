// Products with packed weights. Each panel is read from memory once per item and, unless a tile can read it as it is, decoded
// into a buffer that stays in the first-level cache while all rows of the item pass over it.
#pragma once

#include "quantised.h"
#include "tile.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

constexpr int64_t kDepth = 256;  // inputs of a panel that are worked on at a time: 16 KiB of float32

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows of an item times a few panels, over some of their inputs.
struct Block {
  int64_t row, rows;      // of x and out
  int64_t panel, panels;  // 1, 2 or 4 panels, none of them ragged but a single one
  int64_t begin, count;   // inputs
  const void* weights;    // [panels, stride] decoded
  int64_t stride;
  int64_t width;          // columns of a panel that exist
  const char* next;       // what follows the block's weights in memory
  int64_t bytes;          // size of the block's weights there
};

// ---- forms of weights: what a tile reads, and how it comes there
template <typename T>
struct Floats {
  using Decoded = float;
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);
  static constexpr int kInputs = 1;  // inputs per decoded element

  static void decode(const MatmulArgs& a, int64_t panel, int64_t begin, int64_t count, float* out) {
    const T* data = static_cast<const T*>(a.data) + (panel * a.depth + begin) * kPanel;
    for (int64_t i = 0; i < count * kPanel; i += kLanes) store(out + i, load(data + i));
  }

  static Tile tile(const MatmulArgs& a, const Block& b, int64_t row, float* out, int64_t out_stride) {
    const float* weights = static_cast<const float*>(b.weights);
    return {a.x + row * a.depth + b.begin, a.depth, weights, b.stride, b.count, out, out_stride, b.begin > 0, nullptr, 0};
  }

  // A few rows: values go from registers into sums, in the order of `multiply` and with its result.
  template <int kRows, int kPanels>
  static void multiply_few(const MatmulArgs& a, int64_t row, int64_t panel, Vec sums[kRows][kPanels][kPanelVecs]) {
    const float* x = a.x + row * a.depth;
    const T* data = static_cast<const T*>(a.data) + panel * a.depth * kPanel;
    for (int64_t i = 0; i < a.depth; i++)
      for (int p = 0; p < kPanels; p++)
        for (int v = 0; v < kPanelVecs; v++) {
          Vec value = load(data + (p * a.depth + i) * kPanel + v * kLanes);
          for (int r = 0; r < kRows; r++) sums[r][p][v] += value * x[r * a.depth + i];
        }
  }
};

// Where the panels of a quantised weight begin.
template <int kPanels>
struct Panels {
  const char* data[kPanels];

  Panels(const MatmulArgs& a, int64_t panel) {
    for (int p = 0; p < kPanels; p++)
      data[p] = static_cast<const char*>(a.data) + bytes_of(a.type, (panel + p) * a.depth * kPanel);
  }
};

template <typename Weights>
struct Dequantised : Floats<float> {
  static constexpr bool kInPlace = false;

  static void decode(const MatmulArgs& a, int64_t panel, int64_t begin, int64_t count, float* out) {
    const Panels<1> panels(a, panel);
    for (int64_t first = 0; first < count; first += kGroup) {
      const Lifted<Weights> lifted = affine_of(a, panel, (begin + first) / kGroup);
      each_value<Weights, 1>(panels.data, &lifted, (begin + first) / kGroup, 0, [&](int, int v, int i, Vec value) {
        store(out + (first + i) * kPanel + v * kLanes, value);
      });
    }
  }

  template <int kRows, int kPanels>
  static void multiply_few(const MatmulArgs& a, int64_t row, int64_t panel, Vec sums[kRows][kPanels][kPanelVecs]) {
    const Panels<kPanels> panels(a, panel);
    const float* x = a.x + row * a.depth;
    int64_t ahead = bytes_of(a.type, kPanels * a.depth * kPanel);
    for (int64_t group = 0; group < a.depth / kGroup; group++, x += kGroup) {
      const Lifted<Weights> lifted[2] = {affine_of(a, panel, group), affine_of(a, panel + kPanels - 1, group)};
      each_value<Weights, kPanels>(panels.data, lifted, group, ahead, [&](int p, int v, int i, Vec value) {
        for (int r = 0; r < kRows; r++) sums[r][p][v] += value * x[r * a.depth + i];
      });
    }
  }
};

template <typename Weights>
struct RoundedRows {
  using Decoded = int32_t;
  static constexpr bool kInPlace = false;
  static constexpr int kInputs = Weights::kInputs;

  static void decode(const MatmulArgs& a, int64_t panel, int64_t begin, int64_t count, int32_t* out) {
    const char* data = Panels<1>(a, panel).data[0];
    int64_t first = begin / Weights::kInputs;
    for (int64_t i = 0; i < count / Weights::kInputs; i += Weights::kUnpacked)
      for (int v = 0; v < kPanelVecs; v++) {
        Ints lanes[Weights::kUnpacked];
        Weights::load_steps(data, (first + i) / Weights::kUnpacked, v, lanes);
        for (int j = 0; j < Weights::kUnpacked; j++) store(out + (i + j) * kPanel + v * kLanes, lanes[j]);
      }
  }

  static RoundedTile<Weights> tile(const MatmulArgs& a, const Block& b, int64_t row, float* out, int64_t out_stride) {
    int64_t first = row * a.depth + b.begin;
    int64_t affine = (b.panel * a.depth + b.begin) / kGroup * kPanel;
    Rounded x = a.rounded;
    x.shorts = x.shorts == nullptr ? nullptr : x.shorts + first;
    x.bytes = x.bytes == nullptr ? nullptr : x.bytes + first;
    x.scale += first / kGroup;
    x.sum += first / kGroup;
    const int32_t* weights = static_cast<const int32_t*>(b.weights);
    const uint16_t* offset = a.offset == nullptr ? nullptr : a.offset + affine;
    return {x, a.depth, weights, b.stride, a.scale + affine, offset, b.count, out, out_stride, b.begin > 0, nullptr, 0};
  }

  template <int kRows, int kPanels>
  static void multiply_few(const MatmulArgs& a, int64_t row, int64_t panel, Vec out[kRows][kPanels][kPanelVecs]) {
    const Panels<kPanels> panels(a, panel);
    const auto* x = Weights::row(a.rounded) + row * a.depth;
    int64_t groups = a.depth / kGroup;
    for (int64_t group = 0; group < groups; group++, x += kGroup) {
      typename Weights::Sums sums[kRows][kPanels][kPanelVecs] = {};
      for (int i = 0; i < Weights::kSteps; i += Weights::kUnpacked)
        for (int p = 0; p < kPanels; p++)
          for (int v = 0; v < kPanelVecs; v++) {
            Ints lanes[Weights::kUnpacked];
            Weights::load_steps(panels.data[p], (group * Weights::kSteps + i) / Weights::kUnpacked, v, lanes);
            for (int j = 0; j < Weights::kUnpacked; j++)
              for (int r = 0; r < kRows; r++) {
                Ints inputs = inputs_at(x + r * a.depth + (i + j) * Weights::kInputs);
                sums[r][p][v] = Weights::add(sums[r][p][v], lanes[j], inputs);
              }
          }
      for (int p = 0; p < kPanels; p++) {
        const Affine affine = affine_of(a, panel + p, group);
        for (int r = 0; r < kRows; r++)
          for (int v = 0; v < kPanelVecs; v++) {
            int64_t at = (row + r) * groups + group;
            Ints sum = Weights::total(sums[r][p][v]);
            out[r][p][v] = affine.add(out[r][p][v], sum, a.rounded.scale[at], a.rounded.sum[at], v);
          }
      }
    }
  }
};

// A few rows times a few panels, without a buffer between.
template <typename Form, int kRows, int kPanels>
void multiply_few(const MatmulArgs& a, int64_t row, int64_t panel) {
  Vec sums[kRows][kPanels][kPanelVecs] = {};
  Form::template multiply_few<kRows, kPanels>(a, row, panel, sums);
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++)
      for (int v = 0; v < kPanelVecs; v++)
        store(a.out + (row + r) * a.size_out + (panel + p) * kPanel + v * kLanes, sums[r][p][v]);
}

constexpr int kFewRows = 3;  // from four on, values that were decoded once pay for the buffer

// Does so for `rows` <= kFewRows rows, and says how many of the next `panels` panels it took: one row alone needs the sums of
// two to hide their latency.
template <typename Form>
int64_t multiply_few(const MatmulArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
  if (rows == 1 && panels > 1) return multiply_few<Form, 1, 2>(a, row, panel), 2;
  switch (rows) {
    case 1: multiply_few<Form, 1, 1>(a, row, panel); break;
    case 2: multiply_few<Form, 2, 1>(a, row, panel); break;
    case 3: multiply_few<Form, 3, 1>(a, row, panel); break;
  }
  return 1;
}

// Add a block's products to `out`, or store them if they are the first.
template <typename Form>
void multiply_block(const MatmulArgs& a, const Block& b) {
  alignas(64) float edge[kTileRows * kPanel];
  int64_t tiles = (b.rows + kTileRows - 1) / kTileRows;
  int64_t step = b.bytes / (b.count * tiles);
  const char* ahead = b.next;
  int rows;
  for (int64_t row = b.row; row < b.row + b.rows; row += rows, ahead += b.count * step) {
    rows = next_rows(b.row + b.rows - row);
    float* out = a.out + row * a.size_out + b.panel * kPanel;
    bool ragged = b.width < kPanel;
    auto tile = Form::tile(a, b, row, ragged ? edge : out, ragged ? kPanel : a.size_out);
    tile.ahead = ahead;
    tile.ahead_step = step;
    size_t bytes = static_cast<size_t>(b.width) * sizeof(float);
    for (int r = 0; ragged && tile.add && r < rows; r++) memcpy(edge + r * kPanel, out + r * a.size_out, bytes);
    multiply_tile(tile, rows, static_cast<int>(b.panels));
    for (int r = 0; ragged && r < rows; r++) memcpy(out + r * a.size_out, edge + r * kPanel, bytes);
  }
}

// Rows [row, row + rows) times panels [panel, end).
template <typename Form>
void multiply_panels(const MatmulArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t end) {
  int64_t whole = least(end, a.size_out / kPanel);
  alignas(64) typename Form::Decoded buffer[kDepth * kPanel];
  for (int64_t panels; panel < end; panel += panels) {
    if (rows <= kFewRows && !Form::kInPlace && panel < whole) {
      panels = multiply_few<Form>(a, row, rows, panel, least(whole, end) - panel);
      continue;
    }
    panels = tile_panels(next_rows(rows));
    while (panels > 1 && panel + panels > whole) panels /= 2;
    int64_t depth = Form::kInPlace ? kDepth : kDepth * Form::kInputs / panels;
    for (int64_t begin = 0; begin < a.depth; begin += depth) {
      int64_t count = least(depth, a.depth - begin);
      int64_t width = least(kPanel, a.size_out - panel * kPanel);
      const char* data = static_cast<const char*>(a.data) + bytes_of(a.type, (panel * a.depth + begin) * kPanel);
      int64_t bytes = bytes_of(a.type, count * kPanel);
      int64_t stride = count * kPanel / Form::kInputs;
      Block block = {row, rows, panel, panels, begin, count, buffer, stride, width, data + bytes, bytes};
      if (Form::kInPlace) {
        block.weights = data;
        block.stride = a.depth * kPanel;
      } else {
        for (int64_t p = 0; p < panels; p++) Form::decode(a, panel + p, begin, count, buffer + p * stride);
      }
      multiply_block<Form>(a, block);
    }
  }
}

template <typename Weights>
void multiply_quantised(const MatmulArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t end) {
  if (a.rounded.scale != nullptr) return multiply_panels<RoundedRows<Weights>>(a, row, rows, panel, end);
  multiply_panels<Dequantised<Weights>>(a, row, rows, panel, end);
}

void matmul(const MatmulArgs& a, int64_t item) {
  int64_t row_items = (a.rows + a.item_rows - 1) / a.item_rows;
  int64_t row = item % row_items * a.item_rows;
  int64_t rows = least(a.item_rows, a.rows - row);
  int64_t panel = item / row_items * a.item_panels;
  int64_t end = least(panel + a.item_panels, a.panels);
  switch (a.type) {
    case Type::kFloat32: return multiply_panels<Floats<float>>(a, row, rows, panel, end);
    case Type::kBFloat16: return multiply_panels<Floats<BFloat16>>(a, row, rows, panel, end);
    case Type::kFloat16: return multiply_panels<Floats<Float16>>(a, row, rows, panel, end);
    case Type::kInt8: return multiply_quantised<Int8Weights>(a, row, rows, panel, end);
    case Type::kInt4: return multiply_quantised<Int4Weights>(a, row, rows, panel, end);
  }
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
