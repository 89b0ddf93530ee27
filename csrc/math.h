// Scalar formulas, stated once for every device. Everything here works on one element in `float` or `double`;
// 16-bit types are widened before and rounded after.
//
// Multiply-adds are written as `fused` explicitly and the compiler is told not to contract others, so that an element's
// bits do not depend on the loop it is computed in: a recompute kernel gives what the forward gave.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYCKPT_HD static __host__ __device__ __forceinline__
#else
// Internal linkage: the CPU files are compiled once per instruction set, and the linker must not merge them.
#define PYCKPT_HD static inline __attribute__((always_inline))
#endif

namespace pyckpt {

#if defined(__CUDACC__) || defined(__FMA__) || defined(__aarch64__)
PYCKPT_HD float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
PYCKPT_HD double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
PYCKPT_HD float fused(float a, float b, float c) { return a * b + c; }
PYCKPT_HD double fused(double a, double b, double c) { return a * b + c; }
#endif

PYCKPT_HD uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
PYCKPT_HD uint64_t to_bits(double x) { return __builtin_bit_cast(uint64_t, x); }
PYCKPT_HD float from_bits(uint32_t x) { return __builtin_bit_cast(float, x); }
PYCKPT_HD double from_bits(uint64_t x) { return __builtin_bit_cast(double, x); }

// Comparisons are ordered so that NaN passes through.
template <class F>
PYCKPT_HD F clamp(F x, F low, F high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}
PYCKPT_HD float absolute(float x) { return from_bits(to_bits(x) & 0x7fffffffu); }
PYCKPT_HD double absolute(double x) { return from_bits(uint64_t(to_bits(x) & 0x7fffffffffffffffull)); }

// Powers of two. Adding `round` = 1.5 * 2^mantissa + bias rounds to an integer n and leaves n + bias in the low bits, from
// where a shift makes it the exponent of 2^n.
template <class F>
struct Binary;
template <>
struct Binary<float> {
  static constexpr float round = 12582912.0f + 127.0f, lowest = -87.33f;  // exp(lowest) is just normal
  static constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};
template <>
struct Binary<double> {
  static constexpr double round = 6755399441055744.0 + 1023.0, lowest = -708.39;
  static constexpr double log2e = 1.44269504088896339, ln2_high = 6.93147180369123816e-01, ln2_low = 1.90821492927058770e-10;
};
PYCKPT_HD float power_of_two(float shifted) { return from_bits(to_bits(shifted) << 23); }
PYCKPT_HD double power_of_two(double shifted) { return from_bits(uint64_t(to_bits(shifted) << 52)); }

// exp(r) on |r| <= ln(2) / 2 as 1 + r + r^2 p(r); p interpolates at Chebyshev nodes, error below 2e-10 (float), 2e-19.
PYCKPT_HD float exp_reduced(float r) {
  float p = fused(1.989099082e-04f, r, 1.393365000e-03f);
  p = fused(p, r, 8.333310925e-03f);
  p = fused(p, r, 4.166646493e-02f);
  p = fused(p, r, 1.666666668e-01f);
  p = fused(p, r, 5.000000013e-01f);
  return fused(p * r, r, r) + 1.0f;
}
PYCKPT_HD double exp_reduced(double r) {
  double p = fused(2.09146869680868758e-09, r, 2.51052170047207447e-08);
  p = fused(p, r, 2.75572736431102974e-07);
  p = fused(p, r, 2.75572554002064223e-06);
  p = fused(p, r, 2.48015873255477427e-05);
  p = fused(p, r, 1.98412698748206266e-04);
  p = fused(p, r, 1.38888888888837481e-03);
  p = fused(p, r, 8.33333333332613585e-03);
  p = fused(p, r, 4.16666666666666713e-02);
  p = fused(p, r, 1.66666666666666713e-01);
  p = fused(p, r, 0.5);
  return fused(p * r, r, r) + 1.0;
}

// exp(x) for x <= 0, within 2 ulp; results below the smallest normal number are 0. NaN stays NaN.
template <class F>
PYCKPT_HD F exp_nonpositive(F x) {
  using B = Binary<F>;
  const F shifted = fused(x, B::log2e, B::round), n = shifted - B::round;
  const F r = fused(-n, B::ln2_low, fused(-n, B::ln2_high, x));
  const F y = exp_reduced(r) * power_of_two(shifted);
  return x < B::lowest ? F(0) : y;
}

// 1 / d for d in [1, 2]: a cubic guess, then cubically convergent steps r (1 + e + e^2), e = 1 - d r. Several times faster in
// vectors than a division, and as exact (1 ulp).
template <class F>
PYCKPT_HD F reciprocal(F d) {
  F r = fused(fused(fused(F(-2.218371763e-01), d, F(1.331023270e+00)), d, F(-2.939343060e+00)), d, F(2.828423947e+00));
  F e = fused(-d, r, F(1));
  r = fused(r, fused(e, e, e), r);
  if (sizeof(F) == 8) {
    e = fused(-d, r, F(1));
    r = fused(r, fused(e, e, e), r);
  }
  return r;
}

// Upper tail 1 - cdf(a) of the normal distribution, a >= 0.
// float: 2^(-1 - a s(a)), s the minimax polynomial of -log2(2 tail(a)) / a on [0, 14]: one polynomial and no division.
// Absolute error 1e-7; 0 from 12.9, where the tail is no normal number any more.
PYCKPT_HD float normal_tail(float a) {
  float s = fused(-1.413750996e-13f, a, 1.290092431e-11f);  // -s(a)
  s = fused(s, a, -5.276408488e-10f);
  s = fused(s, a, 1.278774998e-08f);
  s = fused(s, a, -2.044527329e-07f);
  s = fused(s, a, 2.267191629e-06f);
  s = fused(s, a, -1.773756019e-05f);
  s = fused(s, a, 9.573487488e-05f);
  s = fused(s, a, -3.093684938e-04f);
  s = fused(s, a, 1.574072867e-05f);
  s = fused(s, a, 6.963377699e-03f);
  s = fused(s, a, -5.246662012e-02f);
  s = fused(s, a, -4.592114709e-01f);
  s = fused(s, a, -1.151104688e+00f);
  const float z = a * s;
  const float shifted = z + Binary<float>::round, f = z - (shifted - Binary<float>::round);
  float p = fused(6.638236075e-04f, f, 4.837770831e-03f);  // 2^f / 2
  p = fused(p, f, 2.775356638e-02f);
  p = fused(p, f, 1.201105986e-01f);
  p = fused(p, f, 3.465734836e-01f);
  p = fused(p, f, 5.000000360e-01f);
  const float tail = p * power_of_two(shifted);
  return a > 12.9f ? 0.0f : tail;
}
// double: exp(-a^2 / 2) q(t) / (a + 5), t = (a - 5) / (a + 5); q interpolates 0.5 erfcx(a / sqrt(2)) (a + 5) at Chebyshev
// nodes in t: relative error 7e-17.
PYCKPT_HD double normal_tail(double a) {
  a = a > 40.0 ? 40.0 : a;  // the tail is 0 there; keeps infinity out of t
  const double r = 1.0 / (a + 5.0), t = (a - 5.0) * r;
  double q = fused(-8.36627608762287517e-10, t, 4.84140359359810075e-10);
  q = fused(q, t, 9.54269539761261150e-09);
  q = fused(q, t, -4.92178722711651175e-09);
  q = fused(q, t, -6.80212736238434666e-08);
  q = fused(q, t, 3.56267736992871036e-08);
  q = fused(q, t, 4.34248499187807502e-07);
  q = fused(q, t, -3.30852215796474361e-07);
  q = fused(q, t, -2.76949154628418755e-06);
  q = fused(q, t, 3.97776217961243910e-06);
  q = fused(q, t, 1.66811657192719114e-05);
  q = fused(q, t, -4.97617059794555120e-05);
  q = fused(q, t, -5.93756912320177370e-05);
  q = fused(q, t, 5.44898813330748277e-04);
  q = fused(q, t, -7.97869406600651247e-04);
  q = fused(q, t, -2.99337673540330581e-03);
  q = fused(q, t, 2.07950668006901228e-02);
  q = fused(q, t, -6.91186387090605564e-02);
  q = fused(q, t, 1.65020366170352761e-01);
  q = fused(q, t, -3.13533156671204016e-01);
  q = fused(q, t, 4.95305615969976687e-01);
  q = fused(q, t, -6.65382502890057848e-01);
  q = fused(q, t, 7.69193049750062974e-01);
  return exp_nonpositive(-0.5 * a * a) * r * q;
}

struct Normal {  // of the standard normal distribution
  template <class F>
  PYCKPT_HD F cdf(F x) {
    const F tail = normal_tail(absolute(x));
    return x > F(0) ? F(1) - tail : tail;
  }
  template <class F>
  PYCKPT_HD F pdf(F x) {
    return exp_nonpositive(F(-0.5) * x * x) * F(0.3989422804014327);
  }
};

template <class F>
struct Sigmoid {
  F value, complement;
};
// sigmoid(x) and 1 - sigmoid(x), formed from exp(-|x|): no overflow, and no cancellation on either side.
template <class F>
PYCKPT_HD Sigmoid<F> sigmoid(F x) {
  const F e = exp_nonpositive(-absolute(x));
  const F r = reciprocal(F(1) + e);
  const F er = e * r;
  return {x < F(0) ? er : r, x < F(0) ? r : er};
}

// Activations: forward(x), and backward(grad, x) = grad times the derivative. Infinite x gives NaN where torch.nn does
// (infinity times zero).
struct GeluErf {  // x cdf(x), Hendrycks & Gimpel 2016
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * Normal::cdf(x);
  }
  template <class F>
  PYCKPT_HD F backward(F grad, F x) {
    return grad * fused(x, Normal::pdf(x), Normal::cdf(x));
  }
};
struct GeluTanh {  // 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * sigmoid(twice_u(x)).value;
  }
  template <class F>
  PYCKPT_HD F backward(F grad, F x) {
    const F c = clamp(x, F(-100), F(100));  // saturated there; the slope of u must not overflow
    const F slope = F(1.5957691216057308) * fused(F(3 * 0.044715) * c, c, F(1));
    const Sigmoid<F> s = sigmoid(twice_u(x));
    return grad * fused(x * s.value * s.complement, slope, s.value);
  }

 private:
  template <class F>
  PYCKPT_HD F twice_u(F x) {
    return F(1.5957691216057308) * x * fused(F(0.044715) * x, x, F(1));
  }
};
struct Silu {  // x sigmoid(x)
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * sigmoid(x).value;
  }
  template <class F>
  PYCKPT_HD F backward(F grad, F x) {
    const Sigmoid<F> s = sigmoid(x);
    return grad * fused(x * s.value, s.complement, s.value);
  }
};
struct Relu {  // max(x, 0), NaN kept; backward may be given the output in place of x: their signs agree
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x < F(0) ? F(0) : x;
  }
  template <class F>
  PYCKPT_HD F backward(F grad, F x) {
    return x <= F(0) ? F(0) : grad;
  }
};

// Philox4x32-10 (Salmon et al., SC'11). Element i of a tensor takes word i % 4 of the block whose counter is i / 4.
struct PhiloxBlock {
  uint32_t word[4];
};
PYCKPT_HD PhiloxBlock philox(uint64_t key, uint64_t counter) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace pyckpt
