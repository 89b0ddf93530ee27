// What norms, softmax and dropout do with a row's statistics and with one element, stated once for every device.
#pragma once

#include "math.h"

namespace pyckpt {

template <class F>
PYCKPT_HD F infinity() {
  return F(__builtin_huge_val());
}

// Norms. Subtracting both parts of the mean keeps x - mean exact to one rounding however large the mean is.
template <class F>
struct RowStatistics {
  F mean, residual, rstd;  // the first two zero for RMSNorm
};
template <class F>
PYCKPT_HD F shift_of(const RowStatistics<F>& row) {
  return -(row.residual * row.rstd);
}
// A mean in double as two numbers of type F, and rstd.
template <class F>
PYCKPT_HD RowStatistics<F> rounded_statistics(double mean, double variance, double eps) {
  return {F(mean), F(mean - double(F(mean))), F(1.0 / __builtin_sqrt((variance < 0.0 ? 0.0 : variance) + eps))};
}

// h = (x - mean - residual) rstd; x - mean is exact where the mean is large, and the rest is one multiply-add.
template <bool kCentred, class F>
PYCKPT_HD F normalised(F x, F mean, F rstd, F shift) {
  return kCentred ? fused(x - mean, rstd, shift) : x * rstd;
}

// dx = rstd (v - level - h along), v = grad weight: level and along are the means of v and v h.
template <bool kWeight, class F>
PYCKPT_HD F norm_gradient(F h, F grad, F weight, F rstd, F along, F level) {
  const F centred = kWeight ? fused(grad, weight, -level) : grad - level;
  return rstd * fused(-h, along, centred);
}
// Of a row of one element. LayerNorm: constant, gradient 0 (NaN where x is). RMSNorm: v (1 - h^2) rstd = v eps rstd^3, without
// cancellation.
template <bool kCentred, class F>
PYCKPT_HD F norm_gradient_of_one(F v, F rstd, double eps) {
  const double r = double(rstd);
  return F(kCentred ? 0.0 * r : double(v) * eps * r * r * r);
}

// Softmax. Scores scale x + mask, -inf where masked: what lies behind a mask, even NaN, is not looked at.
template <class F>
PYCKPT_HD F kept_score(F x, F scale, int keep) {
  return keep ? x * scale : -infinity<F>();
}
template <class F>
PYCKPT_HD F biased_score(F x, F scale, F bias) {
  return bias == -infinity<F>() ? bias : fused(x, scale, bias);
}

// e / sum by the reciprocal and one correction: a division's result at a multiplication's price. A row in which nothing is kept
// has sum 0 and gives 0.
template <class F>
PYCKPT_HD F inverse_of(F sum) {
  return sum == F(0) ? F(0) : F(1) / sum;
}
template <class F>
PYCKPT_HD F quotient(F e, F sum, F inverse) {
#if !defined(PYCKPT_FUSED)
  return sum == F(0) ? F(0) : e / sum;
#endif
  const F q = e * inverse;
  return fused(fused(-q, sum, e), inverse, q);
}

// Where something may be masked, a probability of zero hides its gradient, which may hold NaN from a masked value.
template <class F>
PYCKPT_HD F weighted(bool masked, F p, F g) {
  return masked && p == F(0) ? F(0) : p * g;
}

// Dropout: an element is kept where its Philox word is at least p 2^32.
struct DropoutRule {
  uint64_t key;
  uint32_t threshold;
  double keep_scale;  // 1 / (1 - p); 0 where p = 1, so that everything is dropped
};
PYCKPT_HD DropoutRule dropout_rule(double p, uint64_t key) {
  return {key, p >= 1 ? 0 : uint32_t(p * 4294967296.0), p >= 1 ? 0 : 1 / (1 - p)};
}

}  // namespace pyckpt
