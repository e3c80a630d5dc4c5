// What adapters add to a product (Hu et al. 2021, arXiv:2106.09685): x times a few rows, and the result times as many rows.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

// Sums that a tile of `tokens` tokens keeps per token: ranks while it shrinks, vectors of columns while it expands.
constexpr int lora_sums(int tokens) { return tokens * 4 <= kSums ? 4 : tokens * 2 <= kSums ? 2 : 1; }

// h [tokens] of ranks [0, kRanks): each is one vector of sums over the inputs, in order, however many tokens there are.
template <int kTokens, int kRanks, typename T>
inline void shrink_ranks(const float* const* x, const T* a, int64_t size_in, float* h, int64_t h_stride) {
  Vec sums[kTokens][kRanks] = {};
  int64_t i = 0;
  for (; i + kLanes <= size_in; i += kLanes) {
    Vec values[kTokens];
    for (int t = 0; t < kTokens; t++) values[t] = load(x[t] + i);
    for (int r = 0; r < kRanks; r++) {
      Vec factor = load(a + r * size_in + i);
      for (int t = 0; t < kTokens; t++) sums[t][r] += values[t] * factor;
    }
  }
  for (int t = 0; t < kTokens; t++) {
    for (int r = 0; r < kRanks; r++) {
      float total = sum(sums[t][r]);
      for (int64_t k = i; k < size_in; k++) total += x[t][k] * scalar(a[r * size_in + k]);
      h[t * h_stride + r] = total;
    }
  }
}

template <int kTokens, typename T>
void shrink(const float* const* x, const T* a, int64_t size_in, int64_t rank, float* h, int64_t h_stride) {
  constexpr int kRanks = lora_sums(kTokens);
  int64_t r = 0;
  for (; r + kRanks <= rank; r += kRanks) shrink_ranks<kTokens, kRanks>(x, a + r * size_in, size_in, h + r, h_stride);
  for (; r < rank; r++) shrink_ranks<kTokens, 1>(x, a + r * size_in, size_in, h + r, h_stride);
}

template <int kTokens, int kVecs, typename T>
inline void expand_columns(const float* h, int64_t h_stride, const T* b, int64_t b_stride, int64_t rank, float* const* out) {
  Vec sums[kTokens][kVecs] = {};
  for (int64_t r = 0; r < rank; r++) {
    for (int v = 0; v < kVecs; v++) {
      Vec factor = load(b + r * b_stride + v * kLanes);
      for (int t = 0; t < kTokens; t++) sums[t][v] += factor * h[t * h_stride + r];
    }
  }
  for (int t = 0; t < kTokens; t++)
    for (int v = 0; v < kVecs; v++) store(out[t] + v * kLanes, sums[t][v]);
}

template <int kTokens, typename T>
void expand(const float* h, int64_t h_stride, const T* b, int64_t b_stride, int64_t rank, int64_t columns, float* const* out) {
  constexpr int kVecs = lora_sums(kTokens);
  float* at[kTokens];
  for (int t = 0; t < kTokens; t++) at[t] = out[t];
  int64_t c = 0;
  auto advance = [&](int64_t count) {
    c += count;
    for (int t = 0; t < kTokens; t++) at[t] += count;
  };
  while (c + kVecs * kLanes <= columns) {
    expand_columns<kTokens, kVecs>(h, h_stride, b + c, b_stride, rank, at);
    advance(kVecs * kLanes);
  }
  while (c + kLanes <= columns) {
    expand_columns<kTokens, 1>(h, h_stride, b + c, b_stride, rank, at);
    advance(kLanes);
  }
  for (; c < columns; advance(1)) {
    for (int t = 0; t < kTokens; t++) {
      float total = 0;
      for (int64_t r = 0; r < rank; r++) total += h[t * h_stride + r] * scalar(b[r * b_stride + c]);
      *at[t] = total;
    }
  }
}

template <int kTokens, typename T>
void adapt_tokens(const LoraArgs& l, const int32_t* tokens, const T* a, const T* b, int64_t rank, int64_t first, int64_t columns) {
  const float* x[kTokens];
  float* out[kTokens];
  for (int t = 0; t < kTokens; t++) {
    x[t] = l.x + tokens[t] * l.size_in;
    out[t] = l.out + tokens[t] * l.size_out + first;
  }
  float h[kTokens * kMostRank];
  shrink<kTokens>(x, a, l.size_in, rank, h, rank);
  expand<kTokens>(h, rank, b, l.size_out, rank, columns, out);
}

template <typename T>
void adapt_item(const LoraArgs& l, const LoraItem& item) {
  int64_t at = (item.slot - 1) * l.layers + l.layer, first = 0;
  for (int p = 0; p < item.part; p++) first += l.columns[p];
  int64_t rank = item.slot == 0 ? 0 : l.ranks[at * l.parts + item.part], columns = l.columns[item.part];
  if (rank <= 0) {
    for (int t = 0; t < item.count; t++) memset(l.out + item.tokens[t] * l.size_out + first, 0, columns * sizeof(float));
    return;
  }
  const T* a = static_cast<const T*>(l.a) + (at * l.parts + item.part) * l.max_rank * l.size_in;
  const T* b = static_cast<const T*>(l.b) + at * l.max_rank * l.size_out + first;
  const int32_t* tokens = item.tokens;
  int left = item.count;
  for (; left >= 4; left -= 4, tokens += 4) adapt_tokens<4>(l, tokens, a, b, rank, first, columns);
  if (left == 3) adapt_tokens<3>(l, tokens, a, b, rank, first, columns);
  if (left == 2) adapt_tokens<2>(l, tokens, a, b, rank, first, columns);
  if (left == 1) adapt_tokens<1>(l, tokens, a, b, rank, first, columns);
}

void adapt(const LoraArgs& l, const LoraItem& item) {
  switch (l.type) {
    case Type::kFloat32: return adapt_item<float>(l, item);
    case Type::kBFloat16: return adapt_item<BFloat16>(l, item);
    default: return adapt_item<Float16>(l, item);
  }
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
