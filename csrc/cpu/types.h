// Element types. Arithmetic is in float (double for double): kernels see rows or blocks of float, converted once on the way in
// and once on the way out; operands that are float already are used where they are.
//
// Each file is compiled once per instruction set into a namespace of its own (CMakeLists.txt defines PYCKPT_ISA): were
// anything here shared, the linker could keep the AVX-512 copy of a function for a machine without AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../row_math.h"
#include "kernels.h"

namespace pyckpt {
namespace PYCKPT_ISA {

PYCKPT_HD int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PYCKPT_HD int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
PYCKPT_HD int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t item_size(int dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

// Whether elements can be worked on where they are: F is their type, or an integer of their size.
template <class F>
static inline bool in_place(int dtype) {
  return item_size(dtype) == int64_t(sizeof(F));
}

// Integer forms of the float16 conversions, for processors without instructions for them.
PYCKPT_HD float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, shifted = uint32_t(bits & 0x7fffu) << 13;
  const uint32_t subnormal = to_bits(from_bits(shifted + (113u << 23)) - from_bits(113u << 23));
  const uint32_t normal = shifted + (112u << 23), special = shifted | 0x7f800000u;
  return from_bits(sign | (shifted < 0x00800000u ? subnormal : shifted < 0x0f800000u ? normal : special));
}
PYCKPT_HD uint16_t to_half(float x) {  // to nearest even
  const uint32_t b = to_bits(x), magnitude = b & 0x7fffffffu, sign = (b >> 16) & 0x8000u;
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return uint16_t(sign | (magnitude < 0x38800000u ? subnormal : magnitude < 0x47800000u ? normal : special));
}
PYCKPT_HD uint16_t to_bfloat16(float x) {  // to nearest even; a NaN that comes out of arithmetic stays one when cut off
  const uint32_t b = to_bits(x);
  return uint16_t((b + (x == x ? 0x7fffu + ((b >> 16) & 1u) : 0u)) >> 16);
}

static inline void widen_bfloat16(const uint16_t* from, float* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = from_bits(uint32_t(from[i]) << 16);
}
#if defined(__AVX512BW__)
// `to_bfloat16` in the upper halves of the elements: half the instructions that compilers find for it.
static inline __m512i rounded_bfloat16(const float* from) {
  const __m512 x = _mm512_loadu_ps(from);
  const __m512i b = _mm512_castps_si512(x);
  const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  const __mmask16 odd = _mm512_mask_test_epi32_mask(number, b, _mm512_set1_epi32(0x10000));
  const __m512i r = _mm512_mask_add_epi32(b, number, b, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(r, odd, r, _mm512_set1_epi32(1));
}
#endif
static inline void narrow_bfloat16(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  static constexpr uint16_t kUpperHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i halves = _mm512_loadu_si512(kUpperHalves);
  for (; i + 32 <= n; i += 32)
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(rounded_bfloat16(from + i), halves, rounded_bfloat16(from + i + 16)));
#endif
#pragma omp simd
  for (int64_t j = i; j < n; ++j) to[j] = to_bfloat16(from[j]);
}
// The masked forms of AVX-512 intrinsics give the same instructions; the plain ones start from an undefined register, which
// GCC warns of.
static inline void widen_float16(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
#pragma omp simd
  for (int64_t j = i; j < n; ++j) to[j] = from_half(from[j]);
}
static inline void narrow_float16(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
#pragma omp simd
  for (int64_t j = i; j < n; ++j) to[j] = to_half(from[j]);
}

// Elements [offset, offset + n) of an array as F: the array itself where it holds F, else converted into `scratch`. A double
// kernel is only ever given double; a float kernel never.
template <class F>
static inline const F* widen(int dtype, const void* base, int64_t offset, int64_t n, F* scratch) {
  if (in_place<F>(dtype)) return static_cast<const F*>(base) + offset;
  if constexpr (sizeof(F) == 4) {
    const uint16_t* from = static_cast<const uint16_t*>(base) + offset;
    dtype == kBFloat16 ? widen_bfloat16(from, scratch, n) : widen_float16(from, scratch, n);
  }
  return scratch;
}

// Where a kernel writes elements that belong at `offset`: in place, or into `scratch` until `narrow` takes them there.
template <class F>
static inline F* target(int dtype, void* base, int64_t offset, F* scratch) {
  return in_place<F>(dtype) ? static_cast<F*>(base) + offset : scratch;
}
template <class F>
static inline void narrow(int dtype, const F* values, void* base, int64_t offset, int64_t n) {
  if constexpr (sizeof(F) == 4) {
    uint16_t* to = static_cast<uint16_t*>(base) + offset;
    if (dtype == kBFloat16) narrow_bfloat16(values, to, n);
    if (dtype == kFloat16) narrow_float16(values, to, n);
  }
}

template <class F>
struct Type {
  using type = F;
};
// Calls body(Type<F>{}) with the type that a dtype's arithmetic is in.
template <class Body>
static inline void with_arithmetic(int dtype, const Body& body) {
  if (dtype == kFloat64)
    body(Type<double>{});
  else
    body(Type<float>{});
}

// Memory of one thread, for one call.
template <class F>
class Scratch {
 public:
  explicit Scratch(int64_t n) : data_(static_cast<F*>(__builtin_malloc(size_t(larger(1, n)) * sizeof(F)))) {}
  ~Scratch() { __builtin_free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  F* at(int64_t offset) const { return data_ + offset; }

 private:
  F* data_;
};

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
