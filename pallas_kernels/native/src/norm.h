// Root-mean-square normalisation of rows (Zhang and Sennrich 2019, arXiv:1910.07467).
#pragma once

#include "simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {

// A value as it is after a round trip through T.
template <typename T>
inline float rounded(float x) {
  T narrow;
  store_scalar(&narrow, x);
  return scalar(narrow);
}

// Sums run in a fixed order: a row's result does not depend on how many there are.
template <typename T, typename W>
void normalise_row(const T* x, const W* weight, T* out, int64_t dim, float eps) {
  Vec squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes)
    for (int k = 0; k < 4; k++) squares[k] += load(x + i + k * kLanes) * load(x + i + k * kLanes);
  for (; i + kLanes <= dim; i += kLanes) squares[0] += load(x + i) * load(x + i);
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < dim; i++) total += scalar(x[i]) * scalar(x[i]);
  float scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(dim) + eps);
  if constexpr (sizeof(T) == sizeof(float)) {
    for (i = 0; i + kLanes <= dim; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < dim; i++) out[i] = x[i] * scale * scalar(weight[i]);
  } else {
    // Both products are rounded, as they are where weights and activations are of a narrow type.
    for (i = 0; i < dim; i++) store_scalar(out + i, rounded<T>(scalar(x[i]) * scale) * rounded<T>(scalar(weight[i])));
  }
}

template <typename T>
void normalise_rows(const NormArgs& a, int64_t row, int64_t end) {
  for (; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.dim;
    T* out = static_cast<T*>(a.out) + row * a.dim;
    switch (a.weight_type) {
      case Type::kFloat32: normalise_row(x, static_cast<const float*>(a.weight), out, a.dim, a.eps); break;
      case Type::kBFloat16: normalise_row(x, static_cast<const BFloat16*>(a.weight), out, a.dim, a.eps); break;
      default: normalise_row(x, static_cast<const Float16*>(a.weight), out, a.dim, a.eps); break;
    }
  }
}

void normalise(const NormArgs& a, int64_t item) {
  int64_t row = item * a.item_rows;
  int64_t end = row + a.item_rows < a.rows ? row + a.item_rows : a.rows;
  switch (a.type) {
    case Type::kFloat32: return normalise_rows<float>(a, row, end);
    case Type::kBFloat16: return normalise_rows<BFloat16>(a, row, end);
    default: return normalise_rows<Float16>(a, row, end);
  }
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
