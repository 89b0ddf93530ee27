// Dropout masks. An element is kept where its Philox word is at least p 2^32; nothing else is ever stored of a mask.
#pragma once

#include "parallel.h"

namespace pyckpt {
namespace PYCKPT_ISA {

struct DropoutRule {
  uint64_t key;
  uint32_t threshold;
  double keep_scale;  // 1 / (1 - p); 0 where p = 1, so that everything is dropped
};
static inline DropoutRule dropout_rule(double p, const int64_t* seed) {
  return {uint64_t(*seed), p >= 1 ? 0 : uint32_t(p * 4294967296.0), p >= 1 ? 0 : 1 / (1 - p)};
}

constexpr int64_t kMaskBlock = 256;

// factors[i] = keep_scale where element begin + i is kept, 0 where it is dropped, for i < kMaskBlock; begin is a multiple of 4.
// Blocks are computed side by side, one to a vector lane, then interleaved.
template <class F>
static inline void dropout_factors(const DropoutRule& rule, int64_t begin, F* factors) {
  uint32_t words[4][kMaskBlock / 4];
  const uint64_t counter = uint64_t(begin) / 4;
#pragma omp simd
  for (int64_t j = 0; j < kMaskBlock / 4; ++j) {
    const PhiloxBlock block = philox(rule.key, counter + uint64_t(j));
    words[0][j] = block.word[0];
    words[1][j] = block.word[1];
    words[2][j] = block.word[2];
    words[3][j] = block.word[3];
  }
  const F scale = F(rule.keep_scale);
  const uint32_t threshold = rule.threshold;
#pragma omp simd
  for (int64_t j = 0; j < kMaskBlock / 4; ++j) {
    factors[4 * j + 0] = words[0][j] >= threshold ? scale : F(0);
    factors[4 * j + 1] = words[1][j] >= threshold ? scale : F(0);
    factors[4 * j + 2] = words[2][j] >= threshold ? scale : F(0);
    factors[4 * j + 3] = words[3][j] >= threshold ? scale : F(0);
  }
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
