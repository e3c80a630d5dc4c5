// The product that everything here is made of: a few rows times panels of 16 columns.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

constexpr int kPanelVecs = kPanel / kLanes;
constexpr int kTileRows = kSums / kPanelVecs < 12 ? kSums / kPanelVecs : 12;

// Panels that a tile of `rows` rows works on at a time: enough sums in flight to hide the latency of their additions.
constexpr int tile_panels(int rows) {
  return rows * 4 * kPanelVecs <= kSums ? 4 : rows * 2 * kPanelVecs <= kSums ? 2 : 1;
}

struct Tile {
  const float* x;      // [rows, x_stride]
  int64_t x_stride;
  const float* panel;  // [panels, panel_stride], each [depth, 16]
  int64_t panel_stride;
  int64_t depth;
  float* out;          // [rows, out_stride], 16 columns per panel
  int64_t out_stride;
  bool add;            // to what is in `out`
  const char* ahead;   // memory that is wanted next; fetched while this tile computes
  int64_t ahead_step;  // bytes of it per input
};

// Sums run over inputs in order, one chain per element: a row's result does not depend on the rows beside it.
template <int kRows, int kPanels>
void multiply(const Tile& t) {
  Vec sums[kRows][kPanels][kPanelVecs];
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++)
      for (int v = 0; v < kPanelVecs; v++)
        sums[r][p][v] = t.add ? load(t.out + r * t.out_stride + p * kPanel + v * kLanes) : Vec{};
  const float* x[kRows];
  for (int r = 0; r < kRows; r++) x[r] = t.x + r * t.x_stride;
  const float* panel = t.panel;
  const char* ahead = t.ahead;
  for (int64_t i = 0; i < t.depth; i++) {
    __builtin_prefetch(ahead);
    ahead += t.ahead_step;
    for (int p = 0; p < kPanels; p++) {
      Vec weights[kPanelVecs];
      for (int v = 0; v < kPanelVecs; v++) weights[v] = load(panel + p * t.panel_stride + v * kLanes);
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kPanelVecs; v++) sums[r][p][v] += weights[v] * x[r][i];
    }
    panel += kPanel;
  }
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++)
      for (int v = 0; v < kPanelVecs; v++) store(t.out + r * t.out_stride + p * kPanel + v * kLanes, sums[r][p][v]);
}

template <int kRows, typename AnyTile>
inline void multiply_rows(const AnyTile& t, int panels) {
  if constexpr (tile_panels(kRows) == 4) {
    if (panels == 4) return multiply<kRows, 4>(t);
  }
  if constexpr (tile_panels(kRows) >= 2) {
    if (panels == 2) return multiply<kRows, 2>(t);
  }
  return multiply<kRows, 1>(t);
}

// A tile of `rows` <= kTileRows rows times 1, 2 or 4 panels, as many as tile_panels(rows) allows.
template <typename AnyTile>
inline void multiply_tile(const AnyTile& t, int rows, int panels) {
  switch (rows) {
    case 1: return multiply_rows<1>(t, panels);
    case 2: return multiply_rows<2>(t, panels);
    case 3: return multiply_rows<3>(t, panels);
#if !defined(__SSE2__) || defined(__AVX2__)
    case 4: return multiply_rows<4>(t, panels);
    case 5: return multiply_rows<5>(t, panels);
    case 6: return multiply_rows<6>(t, panels);
#endif
#if defined(__AVX512F__)
    case 7: return multiply_rows<7>(t, panels);
    case 8: return multiply_rows<8>(t, panels);
    case 9: return multiply_rows<9>(t, panels);
    case 10: return multiply_rows<10>(t, panels);
    case 11: return multiply_rows<11>(t, panels);
    case 12: return multiply_rows<12>(t, panels);
#endif
  }
}

// Rows of the next tile when `left` are left: tiles of nearly equal height, as a low one hides no latency.
inline int next_rows(int64_t left) {
  int64_t tiles = (left + kTileRows - 1) / kTileRows;
  return static_cast<int>((left + tiles - 1) / tiles);
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
