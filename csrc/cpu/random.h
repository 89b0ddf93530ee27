// Dropout masks: the factors of many elements at once. Nothing is ever stored of a mask.
#pragma once

#include "parallel.h"

namespace pyckpt {
namespace PYCKPT_ISA {

constexpr int64_t kMaskBlock = 256;

// 64-bit lanes for `philox` side by side. A lane carries a 32-bit word in its lower half; the upper half is left to whatever
// falls there, since `multiply` looks at the lower halves only. Compilers find no such multiplication in plain C++.
#if defined(__AVX512F__)
struct Wide {
  static constexpr int64_t lanes = 8;
  __m512i v;
  static Wide load(const uint64_t* p) { return {_mm512_loadu_si512(p)}; }
  static Wide all(uint64_t x) { return {_mm512_set1_epi64(int64_t(x))}; }
  void store(uint64_t* p) const { _mm512_storeu_si512(p, v); }
  Wide operator+(Wide b) const { return {_mm512_add_epi64(v, b.v)}; }
  Wide operator^(Wide b) const { return {_mm512_xor_si512(v, b.v)}; }
  Wide upper() const { return {_mm512_maskz_srli_epi64(0xff, v, 32)}; }
  static Wide multiply(Wide a, Wide b) { return {_mm512_maskz_mul_epu32(0xff, a.v, b.v)}; }
  static Wide join(Wide low, Wide high) {
    return {_mm512_mask_blend_epi32(0xaaaa, low.v, _mm512_maskz_slli_epi64(0xff, high.v, 32))};
  }
};
#elif defined(__AVX2__)
struct Wide {
  static constexpr int64_t lanes = 4;
  __m256i v;
  static Wide load(const uint64_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  static Wide all(uint64_t x) { return {_mm256_set1_epi64x(int64_t(x))}; }
  void store(uint64_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  Wide operator+(Wide b) const { return {_mm256_add_epi64(v, b.v)}; }
  Wide operator^(Wide b) const { return {_mm256_xor_si256(v, b.v)}; }
  Wide upper() const { return {_mm256_srli_epi64(v, 32)}; }
  static Wide multiply(Wide a, Wide b) { return {_mm256_mul_epu32(a.v, b.v)}; }
  static Wide join(Wide low, Wide high) { return {_mm256_blend_epi32(low.v, _mm256_slli_epi64(high.v, 32), 0xaa)}; }
};
#else
struct Wide {
  static constexpr int64_t lanes = 1;
  uint64_t v;
  static Wide load(const uint64_t* p) { return {*p}; }
  static Wide all(uint64_t x) { return {x}; }
  void store(uint64_t* p) const { *p = v; }
  Wide operator+(Wide b) const { return {v + b.v}; }
  Wide operator^(Wide b) const { return {v ^ b.v}; }
  Wide upper() const { return {v >> 32}; }
  static Wide multiply(Wide a, Wide b) { return {(a.v & 0xffffffffu) * (b.v & 0xffffffffu)}; }
  static Wide join(Wide low, Wide high) { return {(low.v & 0xffffffffu) | (high.v << 32)}; }
};
#endif

// The words of elements [begin, begin + kMaskBlock), two to a number, the first in its lower half: `philox` of math.h.
static inline void philox_words(uint64_t key, uint64_t begin, uint64_t* words) {
  static constexpr uint64_t kSteps[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  const Wide m0 = Wide::all(0xD2511F53u), m1 = Wide::all(0xCD9E8D57u), steps = Wide::load(kSteps);
  for (int64_t j = 0; j < kMaskBlock / 4; j += Wide::lanes) {
    const Wide counter = Wide::all(begin / 4 + uint64_t(j)) + steps;
    Wide c0 = counter, c1 = counter.upper(), c2 = Wide::all(0), c3 = c2;
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Wide a = Wide::multiply(m0, c0), b = Wide::multiply(m1, c2);
      c0 = b.upper() ^ c1 ^ Wide::all(k0);
      c2 = a.upper() ^ c3 ^ Wide::all(k1);
      c1 = b;
      c3 = a;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    uint64_t first[Wide::lanes], second[Wide::lanes];
    Wide::join(c0, c1).store(first);
    Wide::join(c2, c3).store(second);
    for (int64_t lane = 0; lane < Wide::lanes; ++lane) {
      words[2 * (j + lane)] = first[lane];
      words[2 * (j + lane) + 1] = second[lane];
    }
  }
}

// factors[i] = keep_scale where element begin + i is kept, 0 where it is dropped, for i < kMaskBlock; begin is a multiple of 4.
template <class F>
static inline void dropout_factors(const DropoutRule& rule, int64_t begin, F* factors) {
  uint64_t words[kMaskBlock / 2];
  philox_words(rule.key, uint64_t(begin), words);
  const F scale = F(rule.keep_scale);
  const uint32_t threshold = rule.threshold;
  uint32_t halves[kMaskBlock];
  __builtin_memcpy(halves, words, sizeof(words));
#pragma omp simd
  for (int64_t i = 0; i < kMaskBlock; ++i) factors[i] = halves[i] >= threshold ? scale : F(0);
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
