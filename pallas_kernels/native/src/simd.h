// Vectors of the instruction set that this file is compiled for, and what no operator of theirs does.
//
// Kernels are written once, over `Vec`, and compiled once per instruction set, each into a namespace of its own
// (JAXSERVE_ISA); `dispatch.cc` picks one at run time. Nothing here may use templates of the standard library: their
// instances would be shared by files that are compiled for different CPUs.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef JAXSERVE_ISA
#error "JAXSERVE_ISA names the namespace of the kernels"
#endif

namespace jaxserve {
namespace JAXSERVE_ISA {

// Registers decide how many rows a tile has: its sums, one row of a panel and one broadcast have to fit.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kSums = 24;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kSums = 12;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kSums = 24;
#else
constexpr int kLanes = 4;
constexpr int kSums = 12;
#endif

// Alignment of an element: loads and stores of these are unaligned ones.
typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
typedef int16_t HalfShorts __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef int8_t QuarterBytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }

inline float scalar(float x) { return x; }

inline float scalar(BFloat16 x) {
  uint32_t word = static_cast<uint32_t>(x.bits) << 16;
  float out;
  memcpy(&out, &word, 4);
  return out;
}

inline float scalar(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 half;
  memcpy(&half, &x.bits, 2);
  return half;
#else
  // Subnormals by a product of integers: XLA's threads take subnormal floats for zero.
  uint32_t magnitude = x.bits & 0x7fff;
  float out;
  if (magnitude < 0x400) {
    out = static_cast<float>(magnitude) * 0x1p-24f;
  } else {
    magnitude = (magnitude << 13) + (magnitude < 0x7c00 ? 0x38000000 : 0x70000000);
    memcpy(&out, &magnitude, 4);
  }
  return x.bits & 0x8000 ? -out : out;
#endif
}

// kLanes values from memory, as floats.
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }

inline Vec load(const BFloat16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
#else
  Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
  return reinterpret_cast<Vec&>(words);
#endif
}

inline Vec load(const Float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
#else
  Vec out;
  for (int i = 0; i < kLanes; i++) out[i] = scalar(p[i]);
  return out;
#endif
}

inline Ints load(const int32_t* p) { return *reinterpret_cast<const Ints*>(p); }

// 2 * kLanes bytes as 16-bit integers, two in each lane. GCC 12 converts vectors of bytes one by one, hence the intrinsics.
inline Ints load_pairs(const int8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  return reinterpret_cast<Ints>(vmovl_s8(vld1_s8(p)));
#else
  Ints out;
  for (int i = 0; i < kLanes; i++) out[i] = static_cast<uint16_t>(p[2 * i]) | p[2 * i + 1] * 65536;
  return out;
#endif
}

// sum + a * b, of lanes that hold two 16-bit integers each: both products are added.
inline Ints add_pairs(Ints sum, Ints a, Ints b) {
#if defined(__AVX512F__)
  return sum + reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return sum + reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return sum + reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#elif defined(__aarch64__)
  int16x8_t x = reinterpret_cast<int16x8_t>(a), y = reinterpret_cast<int16x8_t>(b);
  return sum + vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// The same of lanes of 16 bits that hold two bytes each: those of `a` from 0 to 127, those of `b` signed.
inline Shorts add_bytes(Shorts sum, Ints a, Ints b) {
#if defined(__AVX512F__)
  return sum + reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return sum + reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__aarch64__)
  int8x16_t x = reinterpret_cast<int8x16_t>(a), y = reinterpret_cast<int8x16_t>(b);
  return sum + reinterpret_cast<Shorts>(vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y)));
#else
  Shorts x = reinterpret_cast<Shorts&>(a), y = reinterpret_cast<Shorts&>(b);
  return sum + (x & 0xff) * (y << 8 >> 8) + (x >> 8) * (y >> 8);
#endif
}

inline Vec to_float(Ints x) { return __builtin_convertvector(x, Vec); }

// The nearest integers, ties to even, of values within 2^22; anything of others.
inline Ints nearest(Vec x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits
  Vec shifted = x + magic;
  return reinterpret_cast<Ints&>(shifted) - 0x4b400000;
}

// The low bits of each lane.
inline void store_low(int16_t* p, Ints x) { *reinterpret_cast<HalfShorts*>(p) = __builtin_convertvector(x, HalfShorts); }
inline void store_low(int8_t* p, Ints x) { *reinterpret_cast<QuarterBytes*>(p) = __builtin_convertvector(x, QuarterBytes); }

inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
inline void store(int32_t* p, Ints x) { *reinterpret_cast<Ints*>(p) = x; }

// Round to nearest even, as XLA does.
inline void store_scalar(float* p, float x) { *p = x; }

inline void store_scalar(BFloat16* p, float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  bool nan = (word & 0x7fffffff) > 0x7f800000;
  p->bits = nan ? static_cast<uint16_t>(word >> 16 | 0x40) : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline void store_scalar(Float16* p, float x) {
#if defined(__F16C__)
  p->bits = _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  __fp16 half = x;
  memcpy(&p->bits, &half, 2);
#else
  uint32_t word;
  memcpy(&word, &x, 4);
  uint16_t sign = static_cast<uint16_t>(word >> 16 & 0x8000);
  word &= 0x7fffffff;
  if (word > 0x7f800000) {
    p->bits = sign | 0x7e00;
  } else if (word >= 0x477ff000) {  // rounds to infinity
    p->bits = sign | 0x7c00;
  } else if (word >= 0x38800000) {
    p->bits = static_cast<uint16_t>(sign | (word - 0x38000000 + 0xfff + (word >> 13 & 1)) >> 13);
  } else {  // subnormal: let the addition of a power of two round the mantissa
    float magnitude;
    memcpy(&magnitude, &word, 4);
    magnitude += 0.5f;
    memcpy(&word, &magnitude, 4);
    p->bits = static_cast<uint16_t>(sign | (word - 0x3f000000));
  }
#endif
}

inline float sum(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#elif defined(__aarch64__)
  return vaddvq_f32(x);
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

inline Vec select(Ints condition, Vec yes, Vec no) {
  Ints bits = (condition & reinterpret_cast<Ints&>(yes)) | (~condition & reinterpret_cast<Ints&>(no));
  return reinterpret_cast<Vec&>(bits);
}

inline Vec larger(Vec a, Vec b) { return select(a > b, a, b); }

inline float largest(Vec x) {
  float best = x[0];
  for (int i = 1; i < kLanes; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// e^x within 2 ulp for x <= 88; 0 below -87. Range reduction by multiples of ln 2 (Cody and Waite), then the polynomial of
// Cephes' expf.
inline Vec exponential(Vec x) {
  const Vec low = splat(-87.0f);
  Ints tiny = x < low;
  x = larger(x, low);
  const float magic = 12582912.0f;  // as in `nearest`
  Vec shifted = x * 1.44269504088896341f + magic;
  Vec n = shifted - magic;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  Ints bits = reinterpret_cast<Ints&>(y) + (reinterpret_cast<Ints&>(shifted) << 23);
  return select(tiny, Vec{}, reinterpret_cast<Vec&>(bits));
}

inline Vec hyperbolic_tangent(Vec x) {
  const Vec limit = splat(10.0f);  // tanh is 1 in float32 from there on
  x = select(x > limit, limit, x);
  x = larger(x, -limit);
  return 1.0f - 2.0f / (exponential(x + x) + 1.0f);
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
