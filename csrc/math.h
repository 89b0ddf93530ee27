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
template <class F>
PYCKPT_HD F absolute(F x) {
  return x < F(0) ? -x : x;
}

// exp(r) on |r| <= ln(2) / 2 as 1 + r + r^2 p(r); p interpolates at Chebyshev nodes, error below 1e-9 (float), 2e-17.
PYCKPT_HD float exp_reduced(float r) {
  float p = fused(fused(1.989099082e-04f, r, 1.393365000e-03f), r, 8.333310925e-03f);
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

template <class F>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  using Bits = uint32_t;
  static constexpr float low = -110.0f, high = 90.0f, round = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  static constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int mantissa = 23;
  static constexpr Bits bias = 127;
};
template <>
struct ExpConstants<double> {
  using Bits = uint64_t;
  static constexpr double low = -760.0, high = 711.0, round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double log2e = 1.44269504088896339, ln2_high = 6.93147180369123816e-01, ln2_low = 1.90821492927058770e-10;
  static constexpr int mantissa = 52;
  static constexpr Bits bias = 1023;
};

// exp(x) within 1-2 ulp, with gradual underflow, overflow to infinity and NaN kept. 2^n is applied in two halves so that
// neither factor leaves the exponent range.
template <class F>
PYCKPT_HD F exponential(F x) {
  using C = ExpConstants<F>;
  using Bits = typename C::Bits;
  x = clamp(x, C::low, C::high);
  const F shifted = fused(x, C::log2e, C::round);
  const F n = shifted - C::round;
  const F r = fused(-n, C::ln2_low, fused(-n, C::ln2_high, x));
  const F half = fused(n, F(0.5), C::round);
  const Bits zero = to_bits(F(C::round));
  const Bits first = to_bits(half) - zero, second = to_bits(shifted) - zero - first;
  return exp_reduced(r) * from_bits(Bits((first + C::bias) << C::mantissa)) * from_bits(Bits((second + C::bias) << C::mantissa));
}

// Upper tail of the normal distribution: 1 - cdf(a) = exp(-a^2 / 2) q(t) / (a + c), t = (a - c) / (a + c), for a >= 0.
// q interpolates 0.5 erfcx(a / sqrt(2)) (a + c) at Chebyshev nodes in t: relative error 1.2e-8 (float), 7e-17 (double).
PYCKPT_HD float tail_polynomial(float t) {
  float q = fused(-4.976688935e-05f, t, 3.463520082e-05f);
  q = fused(q, t, 4.526939197e-04f);
  q = fused(q, t, -4.177685982e-04f);
  q = fused(q, t, -3.178985901e-03f);
  q = fused(q, t, 6.465234077e-03f);
  q = fused(q, t, 1.740605873e-02f);
  q = fused(q, t, -1.160490454e-01f);
  q = fused(q, t, 3.154250580e-01f);
  q = fused(q, t, -5.655619087e-01f);
  return fused(q, t, 7.444160754e-01f);
}
PYCKPT_HD double tail_polynomial(double t) {
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
  return fused(q, t, 7.69193049750062974e-01);
}
PYCKPT_HD float tail_center(float) { return 3.5f; }
PYCKPT_HD double tail_center(double) { return 5.0; }

template <class F>
struct Normal {
  F cdf, pdf;
};
template <class F>
PYCKPT_HD Normal<F> normal(F x) {
  F a = absolute(x);
  a = a > F(40) ? F(40) : a;  // beyond, both tails are zero in either type; keeps infinity out of t
  const F density = exponential(F(-0.5) * a * a);
  const F r = F(1) / (a + tail_center(F(0)));
  const F tail = density * r * tail_polynomial((a - tail_center(F(0))) * r);
  return {x > F(0) ? F(1) - tail : tail, density * F(0.3989422804014327)};
}

template <class F>
struct Sigmoid {
  F value, slope;
};
// Formed from exp(-|x|), which cannot overflow; the slope s (1 - s) then has no cancellation on either side.
template <class F>
PYCKPT_HD Sigmoid<F> sigmoid(F x) {
  const F e = exponential(-absolute(x));
  const F r = F(1) / (F(1) + e);
  const F er = e * r;
  return {x < F(0) ? er : r, er * r};
}

// Activations: forward(x) and derivative(x). Infinite x gives NaN where torch.nn does (infinity times zero).
struct GeluErf {  // x cdf(x), Hendrycks & Gimpel 2016
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * normal(x).cdf;
  }
  template <class F>
  PYCKPT_HD F derivative(F x) {
    const Normal<F> n = normal(x);
    return fused(x, n.pdf, n.cdf);
  }
};
struct GeluTanh {  // 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * sigmoid(twice_u(x)).value;
  }
  template <class F>
  PYCKPT_HD F derivative(F x) {
    const F c = clamp(x, F(-100), F(100));
    const F slope = F(1.5957691216057308) * fused(F(3 * 0.044715) * c, c, F(1));
    const Sigmoid<F> s = sigmoid(twice_u(x));
    return fused(x * s.slope, slope, s.value);
  }

 private:
  template <class F>
  PYCKPT_HD F twice_u(F x) {
    const F c = clamp(x, F(-100), F(100));  // saturated there; the cube must not overflow
    return F(1.5957691216057308) * c * fused(F(0.044715) * c, c, F(1));
  }
};
struct Silu {  // x sigmoid(x)
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * sigmoid(x).value;
  }
  template <class F>
  PYCKPT_HD F derivative(F x) {
    const Sigmoid<F> s = sigmoid(x);
    return fused(x, s.slope, s.value);
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
