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
#define PYCKPT_FUSED 1  // `fused` rounds once
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

PYCKPT_HD float absolute(float x) { return from_bits(to_bits(x) & 0x7fffffffu); }
PYCKPT_HD double absolute(double x) { return from_bits(uint64_t(to_bits(x) & 0x7fffffffffffffffull)); }

// The smaller of two non-negative numbers, compared as integers: one instruction in vectors, where a comparison of floats that
// keeps NaN takes two. NaN gives `limit`, so the caller has to bring NaN in again.
PYCKPT_HD float at_most(float a, float limit) {
  const int32_t x = __builtin_bit_cast(int32_t, a), y = __builtin_bit_cast(int32_t, limit);
  return __builtin_bit_cast(float, x < y ? x : y);
}
PYCKPT_HD double at_most(double a, double limit) {
  const int64_t x = __builtin_bit_cast(int64_t, a), y = __builtin_bit_cast(int64_t, limit);
  return __builtin_bit_cast(double, x < y ? x : y);
}

// Powers of two. Adding `round` = 1.5 * 2^mantissa + bias rounds to an integer n and leaves n + bias in the low bits, from
// where a shift makes it the exponent of 2^n. n = -bias gives exactly 0: arguments are clamped to where that happens, which
// makes results below the smallest normal number 0 without a comparison.
template <class F>
struct Binary;
template <>
struct Binary<float> {
  static constexpr float round = 12582912.0f + 127.0f, underflow = 88.0296919f;  // 127 ln(2)
  static constexpr float log2e = 1.44269504f;
};
template <>
struct Binary<double> {
  static constexpr double round = 6755399441055744.0 + 1023.0, underflow = 709.08956571282407;  // 1023 ln(2)
  static constexpr double log2e = 1.44269504088896339;
};
PYCKPT_HD float power_of_two(float shifted) { return from_bits(to_bits(shifted) << 23); }
PYCKPT_HD double power_of_two(double shifted) { return from_bits(uint64_t(to_bits(shifted) << 52)); }

// Polynomials below are split into short chains (Estrin's scheme): one long chain of dependent multiply-adds would leave the
// processor's scheduler full of instructions that wait.

// 2^(a c) for a c in [-127, 0], within 1e-7.
PYCKPT_HD float power_of_product(float a, float c) {
  const float shifted = fused(a, c, Binary<float>::round), f = fused(a, c, Binary<float>::round - shifted);
  const float f2 = f * f;
  const float high = fused(1.326472725e-03f, f, 9.671512786e-03f);
  const float middle = fused(5.550733744e-02f, f, 2.402224208e-01f);
  const float low = fused(6.931469776e-01f, f, 1.0f);
  const float p = fused(fused(high, f2, middle), f2, low);
  return p * power_of_two(shifted);
}

// exp(r) on |r| <= ln(2) / 2 as 1 + r + r^2 p(r); p minimax, error below 4e-9 (float); interpolated at Chebyshev nodes, 2e-19.
PYCKPT_HD float exp_reduced(float r) {
  const float r2 = r * r;
  const float middle = fused(8.368715486e-03f, r, 4.166838789e-02f), low = fused(1.666652064e-01f, r, 4.999999345e-01f);
  return fused(fused(fused(1.381460308e-03f, r2, middle), r2, low), r2, r) + 1.0f;
}
PYCKPT_HD double exp_reduced(double r) {
  const double r2 = r * r, r4 = r2 * r2;
  const double a = fused(1.66666666666666713e-01, r, 0.5);
  const double b = fused(8.33333333332613585e-03, r, 4.16666666666666713e-02);
  const double c = fused(1.98412698748206266e-04, r, 1.38888888888837481e-03);
  const double d = fused(2.75572554002064223e-06, r, 2.48015873255477427e-05);
  const double e = fused(2.51052170047207447e-08, r, 2.75572736431102974e-07);
  const double high = fused(fused(2.09146869680868758e-09, r2, e), r4, fused(d, r2, c));
  return fused(fused(high, r4, fused(b, r2, a)), r2, r) + 1.0;
}

// x - n ln(2). One multiply-add will do for float: what ln(2) loses to rounding is felt in results near underflow alone.
PYCKPT_HD float without_powers(float x, float n) {
#if defined(PYCKPT_FUSED)
  return fused(-n, 0.693147181f, x);
#else
  return x - n * 0.693359375f + n * 2.12194440e-4f;
#endif
}
PYCKPT_HD double without_powers(double x, double n) {
  return fused(-n, 1.90821492927058770e-10, fused(-n, 6.93147180369123816e-01, x));
}

// exp(x) for x in [-underflow, 0]: within 2 ulp, in float within (2 - x / 44) ulp.
template <class F>
PYCKPT_HD F exp_in_range(F x) {
  const F shifted = fused(x, Binary<F>::log2e, Binary<F>::round), n = shifted - Binary<F>::round;
  return exp_reduced(without_powers(x, n)) * power_of_two(shifted);
}
// exp(x) for every x <= 0; NaN stays NaN.
template <class F>
PYCKPT_HD F exp_nonpositive(F x) {
  return exp_in_range(x < -Binary<F>::underflow ? -Binary<F>::underflow : x);
}

// tanh(x): near 0 a polynomial (a rational function) that keeps relative accuracy, elsewhere from exp(-2 |x|). After Cephes.
PYCKPT_HD float tangent_near_zero(float x) {
  const float z = x * x;
  const float p =
      fused(fused(fused(fused(-5.70498872745e-03f, z, 2.06390887954e-02f), z, -5.37397155531e-02f), z, 1.33314422036e-01f), z,
            -3.33332819422e-01f);
  return fused(x * z, p, x);
}
PYCKPT_HD double tangent_near_zero(double x) {
  const double z = x * x;
  const double p = fused(fused(-9.64399179425052238628e-01, z, -9.92877231001918586564e+01), z, -1.61468768441708447952e+03);
  const double q = fused(fused(z + 1.12811678491632931402e+02, z, 2.23548839060100448583e+03), z, 4.84406305325125486048e+03);
  return fused(x * z, p / q, x);
}
template <class F>
PYCKPT_HD F hyperbolic_tangent(F x) {
  const F a = absolute(x), e = exp_nonpositive(F(-2) * a), far = (F(1) - e) / (F(1) + e);
  const F signed_far = x < F(0) ? -far : far;
  return a < F(0.625) ? tangent_near_zero(x) : signed_far;  // NaN: not less, and NaN all the way
}

// Density exp(-a^2 / 2) / sqrt(2 pi) and upper tail 1 - cdf(a) of the standard normal distribution, a >= 0, from one exponential.
template <class F>
struct Normal {
  F density, tail;
};
// float: tail exp(a^2 / 2) is a polynomial in u = a / (1 + 0.3 a), after Abramowitz & Stegun 26.2.17; fitted to a in [0, 13.5],
// where it costs the tail less than 4e-9, and nothing at 0. 0 from where the exponential is no normal number any more.
PYCKPT_HD Normal<float> normal(float a) {
  a = at_most(a, 13.2687f);  // a^2 / 2 = 127 ln(2)
  const float e = power_of_product(a * a, -0.72134752f);
  const float u = a / fused(0.3f, a, 1.0f), u2 = u * u;
  const float c0 = fused(-3.989422632e-01f, u, 0.5f), c2 = fused(-1.888486881e-02f, u, 1.303171199e-01f);
  const float c4 = fused(3.608655576e-04f, u, -4.546415615e-04f), c6 = fused(-1.129138536e-05f, u, 2.788451771e-05f);
  return {0.398942280f * e, fused(fused(fused(c6, u2, c4), u2, c2), u2, c0) * e};
}
// double: exp(-a^2 / 2) q(t) / (a + 5), t = (a - 5) / (a + 5); q interpolates 0.5 erfcx(a / sqrt(2)) (a + 5) at Chebyshev
// nodes in t: relative error 7e-17.
PYCKPT_HD Normal<double> normal(double a) {
  a = at_most(a, 37.65869);  // a^2 / 2 = 1023 ln(2)
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
  const double e = exp_in_range(-0.5 * a * a);
  return {e * 0.3989422804014327, e * r * q};
}

template <class F>
struct Sigmoid {
  F value, slope;
};
// sigmoid(x) and its derivative, from exp(-|x|): no overflow, and no cancellation on either side. Not NaN for NaN.
template <class F>
PYCKPT_HD Sigmoid<F> sigmoid(F x) {
  const F e = exp_in_range(-at_most(absolute(x), Binary<F>::underflow));
  const F large = F(1) / (F(1) + e), small = e * large;
  return {x < F(0) ? small : large, small * large};
}

// Activations: forward(x), and backward(grad, x) = grad times the derivative. The factor x brings in NaN,
// and infinity times zero where torch.nn has it too.
struct GeluErf {  // x cdf(x), Hendrycks & Gimpel 2016
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * cdf(x, normal(absolute(x)).tail);
  }
  template <class F>
  PYCKPT_HD F backward(F grad, F x) {
    const Normal<F> n = normal(absolute(x));
    return grad * fused(x, n.density, cdf(x, n.tail));
  }

 private:
  PYCKPT_HD float cdf(float x, float tail) { return x > 0.0f ? 1.0f - tail : tail; }
  PYCKPT_HD double cdf(double x, double tail) {
    const double outer = x > 0.0 ? 1.0 - tail : tail;
    return absolute(x) < 1.0 ? fused(x, central_slope(x * x), 0.5) : outer;
  }
  // (cdf(x) - 1/2) / x on [-1, 1] as a polynomial in x^2, error 1e-19: half an ulp of cdf where the tail's form has two.
  PYCKPT_HD double central_slope(double s) {
    const double s2 = s * s, s4 = s2 * s2;
    const double a = fused(-6.64903800669054273e-02, s, 3.98942280401432703e-01);
    const double b = fused(-1.18732821546803434e-03, s, 9.97355701003502237e-03);
    const double c = fused(-9.44465579310384498e-06, s, 1.15434687516559410e-04);
    const double d = fused(-4.12241075141608145e-08, s, 6.65967987965523093e-07);
    const double e = fused(-1.10643282827558905e-10, s, 2.27041375856759989e-09);
    const double high = fused(fused(4.07432697742662756e-12, s2, e), s4, fused(d, s2, c));
    return fused(high, s4, fused(b, s2, a));
  }
};
struct GeluTanh {  // 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * sigmoid(twice_u(x, x * x)).value;
  }
  template <class F>
  PYCKPT_HD F backward(F grad, F x) {
    const F square = x * x;
    const F du = fused(F(3 * kCubic), at_most(square, F(1e4)), F(kLinear));  // bounded: the sigmoid is saturated there
    const Sigmoid<F> s = sigmoid(twice_u(x, square));
    return grad * fused(x * s.slope, du, s.value);
  }

 private:
  static constexpr double kLinear = 1.5957691216057308, kCubic = 0.044715 * kLinear;
  template <class F>
  PYCKPT_HD F twice_u(F x, F square) {
    return x * fused(F(kCubic), square, F(kLinear));
  }
};
struct GeluSigmoid {  // x sigmoid(1.702 x)
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x * sigmoid(F(1.702) * x).value;
  }
  template <class F>
  PYCKPT_HD F backward(F grad, F x) {
    const F u = F(1.702) * x;
    const Sigmoid<F> s = sigmoid(u);
    return grad * fused(u, s.slope, s.value);
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
    return grad * fused(x, s.slope, s.value);
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
