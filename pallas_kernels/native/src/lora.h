// What adapters add to a product (Hu et al. 2021, arXiv:2106.09685): x times a few rows, and the result times as many rows.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

// Ranks that a tile of `tokens` tokens works on at a time.
constexpr int lora_sums(int tokens) { return tokens * 4 <= kSums ? 4 : tokens * 2 <= kSums ? 2 : 1; }

// sum + a * b, rounded once where the instruction set can. Compilers fuse `+` and `*` in most places, but a token's bits must
// not depend on how many tokens its instance of a template has.
inline Vec add_product(Vec sum, Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#elif defined(__aarch64__)
  return vfmaq_f32(sum, a, b);
#else
  return sum + a * b;
#endif
}

// The last `count` < kLanes values of a row, and zeros: what is left of a row is worked on in vectors like the rest.
template <typename T>
inline Vec load_last(const T* p, int64_t count) {
  Vec out = {};
  for (int64_t i = 0; i < count; i++) out[i] = scalar(p[i]);
  return out;
}

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
      for (int t = 0; t < kTokens; t++) sums[t][r] = add_product(sums[t][r], values[t], factor);
    }
  }
  if (i < size_in) {
    for (int r = 0; r < kRanks; r++) {
      Vec factor = load_last(a + r * size_in + i, size_in - i);
      for (int t = 0; t < kTokens; t++) sums[t][r] = add_product(sums[t][r], load_last(x[t] + i, size_in - i), factor);
    }
  }
  for (int t = 0; t < kTokens; t++)
    for (int r = 0; r < kRanks; r++) h[t * h_stride + r] = sum(sums[t][r]);
}

template <int kTokens, typename T>
void shrink(const float* const* x, const T* a, int64_t size_in, int64_t rank, float* h, int64_t h_stride) {
  constexpr int kRanks = lora_sums(kTokens);
  int64_t r = 0;
  for (; r + kRanks <= rank; r += kRanks) shrink_ranks<kTokens, kRanks>(x, a + r * size_in, size_in, h + r, h_stride);
  for (; r < rank; r++) shrink_ranks<kTokens, 1>(x, a + r * size_in, size_in, h + r, h_stride);
}

// out [tokens] (plus, unless these are the first ranks) h of kRanks ranks times their rows of b. Rows are read from end to end:
// memory is quickest in long runs, and an adapter that one token has is read for nothing else.
template <int kTokens, int kRanks, typename T>
inline void expand_ranks(const float* h, int64_t h_stride, const T* b, int64_t b_stride, int64_t columns, float* const* out, bool add) {
  float factors[kTokens][kRanks];
  for (int t = 0; t < kTokens; t++)
    for (int r = 0; r < kRanks; r++) factors[t][r] = h[t * h_stride + r];
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Vec rows[kRanks];
    for (int r = 0; r < kRanks; r++) rows[r] = load(b + r * b_stride + c);
    for (int t = 0; t < kTokens; t++) {
      Vec total = add ? load(out[t] + c) : Vec{};
      for (int r = 0; r < kRanks; r++) total = add_product(total, rows[r], splat(factors[t][r]));
      store(out[t] + c, total);
    }
  }
  if (c == columns) return;
  Vec rows[kRanks];
  for (int r = 0; r < kRanks; r++) rows[r] = load_last(b + r * b_stride + c, columns - c);
  for (int t = 0; t < kTokens; t++) {
    Vec total = add ? load_last(out[t] + c, columns - c) : Vec{};
    for (int r = 0; r < kRanks; r++) total = add_product(total, rows[r], splat(factors[t][r]));
    for (int64_t i = 0; c + i < columns; i++) out[t][c + i] = total[i];
  }
}

template <int kTokens, typename T>
void expand(const float* h, int64_t h_stride, const T* b, int64_t b_stride, int64_t rank, int64_t columns, float* const* out) {
  constexpr int kRanks = lora_sums(kTokens);
  int64_t r = 0;
  for (; r + kRanks <= rank; r += kRanks)
    expand_ranks<kTokens, kRanks>(h + r, h_stride, b + r * b_stride, b_stride, columns, out, r > 0);
  for (; r < rank; r++) expand_ranks<kTokens, 1>(h + r, h_stride, b + r * b_stride, b_stride, columns, out, r > 0);
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
