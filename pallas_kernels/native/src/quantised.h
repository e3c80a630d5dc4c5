// Quantised weights in panels, and their products with rows that are rounded to 8 bits: a group's integers are multiplied and
// added exactly, whatever the order, and its scales come in once.
#pragma once

#include "tile.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

// ---- what a panel holds: kInputs inputs of a column in a lane, at each of kSteps steps of a group
struct Int8Weights {
  using Row = int16_t;
  using Sums = Ints;
  static constexpr int kInputs = 2;
  static constexpr int kSteps = kGroup / kInputs;
  static constexpr int kUnpacked = 1;  // steps that a load holds
  static constexpr int64_t kStepBytes = kInputs * kPanel;

  static Row* row(const Rounded& x) { return x.shorts; }
  static void load_steps(const void* panel, int64_t at, int v, Ints* out) {
    out[0] = load_pairs(static_cast<const int8_t*>(panel) + (at * kPanel + v * kLanes) * kInputs);
  }
  static Ints lifted(Ints lane, int i) { return i == 0 ? lane << 16 : lane & splat(~0xffff); }
  static constexpr float lift(int) { return 0x1p16f; }
  static void load_lanes(const void* panel, int64_t at, int v, Ints* out) { load_steps(panel, at, v, out); }
  static Sums add(Sums sums, Ints weights, Ints x) { return add_pairs(sums, weights, x); }
  static Ints total(Sums sums) { return sums; }
};

struct Int4Weights {
  using Row = int8_t;
  using Sums = Shorts;  // they hold a group: 8 steps of two products of at most 15 * 127
  static constexpr int kInputs = 4;
  static constexpr int kSteps = kGroup / kInputs;
  static constexpr int kUnpacked = 2;
  static constexpr int64_t kStepBytes = 4 * kPanel;

  static Row* row(const Rounded& x) { return x.bytes; }
  static void load_steps(const void* panel, int64_t at, int v, Ints* out) {
    load_lanes(panel, at, v, out);
    for (int j = 0; j < kUnpacked; j++) out[j] &= 0x0f0f0f0f;
  }
  static void load_lanes(const void* panel, int64_t at, int v, Ints* out) {
    out[0] = load(static_cast<const int32_t*>(panel) + at * kPanel + v * kLanes);
    out[1] = out[0] >> 4;
  }
  static Ints lifted(Ints lane, int i) { return lane & splat(15 << (8 * i)); }
  static constexpr float lift(int i) { return static_cast<float>(1 << (8 * i)); }
  static Sums add(Sums sums, Ints weights, Ints x) { return add_bytes(sums, weights, x); }
  static Ints total(Sums sums) { return add_pairs(Ints{}, reinterpret_cast<Ints&>(sums), splat(0x10001)); }
};

// Scales and offsets of one group, 16 columns.
struct Affine {
  Vec scale[kPanelVecs];
  Vec offset[kPanelVecs];

  Affine(const uint16_t* scales, const uint16_t* offsets, int64_t group) {
    for (int v = 0; v < kPanelVecs; v++) {
      int64_t at = group * kPanel + v * kLanes;
      scale[v] = load(reinterpret_cast<const Float16*>(scales) + at);
      offset[v] = offsets == nullptr ? Vec{} : load(reinterpret_cast<const Float16*>(offsets) + at);
    }
  }

  // An element, with what a group adds to it: `sum` is that of its products.
  Vec add(Vec element, Ints sum, float x_scale, float x_sum, int v) const {
    element += to_float(sum) * (scale[v] * x_scale);
    return element + offset[v] * x_sum;
  }
};

inline Affine affine_of(const MatmulArgs& a, int64_t panel, int64_t group) {
  int64_t first = panel * (a.depth / kGroup) * kPanel;
  return Affine(a.scale + first, a.offset == nullptr ? nullptr : a.offset + first, group);
}

// What makes values of the integers in the lanes of a group: each stands in its lane at its own height, and is left there,
// as a scale by a power of two costs no bit.
template <typename Weights>
struct Lifted {
  Vec scale[Weights::kInputs][kPanelVecs];
  Vec offset[kPanelVecs];

  Lifted(const Affine& affine) {
    for (int v = 0; v < kPanelVecs; v++) {
      for (int k = 0; k < Weights::kInputs; k++) scale[k][v] = affine.scale[v] * (1 / Weights::lift(k));
      offset[v] = affine.offset[v];
    }
  }

  Vec value(Ints lane, int k, int v) const { return to_float(Weights::lifted(lane, k)) * scale[k][v] + offset[v]; }
};

// What happens to weights on their way through registers: visit(p, v, input of the group, values of the lanes). Meanwhile what
// lies `ahead` bytes behind them is fetched, unless that is 0.
template <typename Weights, int kPanels, typename Visit>
inline void each_value(const char* const* data, const Lifted<Weights>* lifted, int64_t group, int64_t ahead,
                       const Visit& visit) {
  for (int i = 0; i < Weights::kSteps; i += Weights::kUnpacked)
    for (int p = 0; p < kPanels; p++) {
      int64_t step = (group * Weights::kSteps + i) / Weights::kUnpacked;
      if (ahead != 0) __builtin_prefetch(data[p] + step * Weights::kStepBytes + ahead);
      for (int v = 0; v < kPanelVecs; v++) {
        Ints lanes[Weights::kUnpacked];
        Weights::load_lanes(data[p], step, v, lanes);
        for (int j = 0; j < Weights::kUnpacked; j++)
          for (int k = 0; k < Weights::kInputs; k++)
            visit(p, v, (i + j) * Weights::kInputs + k, lifted[p].value(lanes[j], k, v));
      }
    }
}

// x [rows, depth] rounded to 8 bits, group by group. A group that holds NaN or infinity has a scale of NaN.
template <typename Weights>
void round_for(const float* x, int64_t rows, int64_t depth, const Rounded& out) {
  constexpr int kVecs = kGroup / kLanes;
  for (int64_t group = 0; group < rows * depth / kGroup; group++) {
    Vec values[kVecs];
    Vec top = {}, check = {};
    for (int v = 0; v < kVecs; v++) {
      values[v] = load(x + group * kGroup + v * kLanes);
      top = larger(top, larger(values[v], -values[v]));
      check += values[v] * 0.0f;
    }
    float most = largest(top);
    // XLA's threads take subnormal floats for zero: below this, the inverse would be infinite.
    float inverse = most > 1e-30f ? 127 / most : 0.0f;
    Ints total = {};
    for (int v = 0; v < kVecs; v++) {
      Ints whole = nearest(values[v] * inverse);
      total += whole;
      store_low(Weights::row(out) + group * kGroup + v * kLanes, whole);
    }
    out.scale[group] = most / 127 + sum(check);
    out.sum[group] = sum(to_float(total)) * out.scale[group];
  }
}

void round_rows(const float* x, int64_t rows, int64_t depth, const Rounded& out) {
  if (out.bytes == nullptr) return round_for<Int8Weights>(x, rows, depth, out);
  round_for<Int4Weights>(x, rows, depth, out);
}

template <typename Weights>
struct RoundedTile {
  Rounded x;               // from the tile's first row and input on
  int64_t depth;           // of whole rows
  const int32_t* panel;    // [panels, panel_stride] lanes, each panel [count / kInputs, 16]
  int64_t panel_stride;
  const uint16_t* scale;   // [panels, depth / 32, 16]
  const uint16_t* offset;  // the same, or null
  int64_t count;           // inputs
  float* out;              // [rows, out_stride], 16 columns per panel
  int64_t out_stride;
  bool add;                // to what is in `out`
  const char* ahead;       // memory that is wanted next; fetched while this tile computes
  int64_t ahead_step;      // bytes of it per input
};

// The inputs of one step, in all lanes.
template <typename Row>
Ints inputs_at(const Row* x) {
  int32_t inputs;
  memcpy(&inputs, x, sizeof inputs);
  return splat(inputs);
}

// Groups are added in order, one chain per element: a row's result does not depend on the rows beside it. Elements stay in
// registers or on the stack until the end: rows of `out` may lie a multiple of 4 KiB apart, where a load waits for stores to
// the other rows.
template <int kRows, int kPanels, typename Weights>
void multiply(const RoundedTile<Weights>& t) {
  const Rounded rounded = t.x;
  int64_t groups = t.depth / kGroup;
  const char* ahead = t.ahead;
  Vec out[kRows][kPanels][kPanelVecs];
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++)
      for (int v = 0; v < kPanelVecs; v++)
        out[r][p][v] = t.add ? load(t.out + r * t.out_stride + p * kPanel + v * kLanes) : Vec{};
  for (int64_t group = 0; group < t.count / kGroup; group++) {
    typename Weights::Sums sums[kRows][kPanels][kPanelVecs] = {};
    const int32_t* panel = t.panel + group * Weights::kSteps * kPanel;
    const auto* x = Weights::row(rounded) + group * kGroup;
    for (int i = 0; i < Weights::kSteps; i++) {
      __builtin_prefetch(ahead);
      ahead += Weights::kInputs * t.ahead_step;
      for (int p = 0; p < kPanels; p++) {
        Ints weights[kPanelVecs];
        for (int v = 0; v < kPanelVecs; v++) weights[v] = load(panel + p * t.panel_stride + i * kPanel + v * kLanes);
        for (int r = 0; r < kRows; r++) {
          Ints inputs = inputs_at(x + r * t.depth + i * Weights::kInputs);
          for (int v = 0; v < kPanelVecs; v++) sums[r][p][v] = Weights::add(sums[r][p][v], weights[v], inputs);
        }
      }
    }
    for (int p = 0; p < kPanels; p++) {
      const uint16_t* offset = t.offset == nullptr ? nullptr : t.offset + p * groups * kPanel;
      const Affine affine(t.scale + p * groups * kPanel, offset, group);
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kPanelVecs; v++) {
          int64_t at = r * groups + group;
          out[r][p][v] = affine.add(out[r][p][v], Weights::total(sums[r][p][v]), rounded.scale[at], rounded.sum[at], v);
        }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++)
      for (int v = 0; v < kPanelVecs; v++) store(t.out + r * t.out_stride + p * kPanel + v * kLanes, out[r][p][v]);
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
