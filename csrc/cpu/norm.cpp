// LayerNorm (Ba et al., 2016) and RMSNorm (Zhang & Sennrich, 2019) over the last `columns` elements of each row.
//
// Statistics, per row, in float (double for double): LayerNorm keeps mean, what the mean lost to rounding, and
// rstd = 1 / sqrt(variance + eps); RMSNorm keeps rstd. Subtracting both parts of the mean keeps x - mean exact to one
// rounding however large the mean is.
// Forward reads x once from memory (the further passes over a row find it in cache) and writes y; recompute does the same
// from the saved statistics, without the passes that compute them; backward reads grad and x and writes dx: 2, 2 and 3
// elements moved per element.
// Parameter gradients: each block of rows sums into its own float row, and the blocks are added in order in double, so the
// result depends neither on the number of threads nor on who finished first.
#include "launchers.h"

namespace pyckpt {
namespace PYCKPT_ISA {

template <class F>
struct Centre {  // of one row; zero for RMSNorm
  F mean, residual;
};
template <class F>
PYCKPT_HD F square_root(F x) {
  return sizeof(F) == 4 ? F(__builtin_sqrtf(float(x))) : F(__builtin_sqrt(double(x)));
}

template <bool kCentred, class F>
PYCKPT_HD F normalised(F x, Centre<F> centre, F rstd) {
  return kCentred ? ((x - centre.mean) - centre.residual) * rstd : x * rstd;
}

template <class T, class F>
static inline Centre<F> row_centre(const T* x, int64_t n) {
  const F mean = sum_over<F>(n, [=](int64_t i) { return load(x + i); }) / F(n);
  const F residual = sum_over<F>(n, [=](int64_t i) { return load(x + i) - mean; }) / F(n);
  // Infinities: inf - inf is NaN, which would hide an infinite mean's own NaN pattern; both give NaN outputs.
  const F corrected = mean + residual;
  return {corrected, residual - (corrected - mean)};
}

template <bool kCentred, class T, class P>
static void forward_rows(const NormArguments& a, T* y, arithmetic<T>* statistics, bool recompute, int threads) {
  using F = arithmetic<T>;
  const Rows rows{a.rows, a.x_view.inner, a.x_view.outer_stride, a.x_view.inner_stride};
  const T* x_base = static_cast<const T*>(a.x);
  const P* weight = static_cast<const P*>(a.weight);
  const P* bias = static_cast<const P*>(a.bias);
  const int64_t n = a.columns;
  F* means = statistics;
  F* residuals = statistics + a.rows;
  F* rstds = statistics + (kCentred ? 2 * a.rows : 0);
  parallel_for(a.rows, 1, divide_up(kGrain, larger(1, n)), threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = x_base + rows.offset(row);
      T* out = y + row * n;
      if (!recompute) {
        Centre<F> centre{};
        if (kCentred) {
          centre = row_centre<T, F>(x, n);
          means[row] = centre.mean;
          residuals[row] = centre.residual;
        }
        const F squares = sum_over<F>(n, [=](int64_t i) {
          const F d = normalised<kCentred>(F(load(x + i)), centre, F(1));
          return d * d;
        });
        rstds[row] = F(1) / square_root(squares / F(n) + F(a.eps));
      }
      const Centre<F> centre = kCentred ? Centre<F>{means[row], residuals[row]} : Centre<F>{};
      const F rstd = rstds[row];
      if (weight && bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
          store(out + i, fused(normalised<kCentred>(F(load(x + i)), centre, rstd), F(load(weight + i)), F(load(bias + i))));
      } else if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(out + i, normalised<kCentred>(F(load(x + i)), centre, rstd) * F(load(weight + i)));
      } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
          store(out + i, normalised<kCentred>(F(load(x + i)), centre, rstd) + (bias ? F(load(bias + i)) : F(0)));
      }
    }
  });
}

// One row of backward. With h = (x - mean) rstd and v = grad weight:
// dx = rstd (v - mean(v) - h mean(v h)), without mean(v) for RMSNorm; dweight += grad h; dbias += grad.
// The sums and both parameter gradients come from one pass, dx from a second over the row in cache.
template <bool kCentred, bool kWeight, bool kParameters, class T, class P>
static inline void backward_row(int64_t n, const T* x, const T* grad, const P* weight, Centre<arithmetic<T>> centre,
                                arithmetic<T> rstd, T* dx, arithmetic<T>* dweight, arithmetic<T>* dbias) {
  using F = arithmetic<T>;
  double along_total = 0, level_total = 0;
  for (int64_t start = 0; start < n; start += 1024) {  // chunked as in sum_over
    const int64_t end = smaller(n, start + 1024);
    F along = 0, level = 0;
#pragma omp simd reduction(+ : along, level)
    for (int64_t i = start; i < end; ++i) {
      const F g = load(grad + i), h = normalised<kCentred>(F(load(x + i)), centre, rstd);
      const F v = kWeight ? g * F(load(weight + i)) : g;
      along += v * h;
      if (kCentred) level += v;
      if (kParameters) {
        dweight[i] = fused(g, h, dweight[i]);
        if (kCentred) dbias[i] += g;
      }
    }
    along_total += double(along);
    level_total += double(level);
  }
  if (!dx) return;
  const F along = F(along_total / double(n)), level = F(level_total / double(n));
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const F g = load(grad + i), h = normalised<kCentred>(F(load(x + i)), centre, rstd);
    const F v = kWeight ? g * F(load(weight + i)) : g;
    store(dx + i, rstd * fused(-h, along, v - level));
  }
}

template <bool kCentred, bool kWeight, bool kParameters, class T, class P>
static void backward_rows(const NormArguments& a, const NormGradients& out, int threads) {
  using F = arithmetic<T>;
  const Rows x_rows{a.rows, a.x_view.inner, a.x_view.outer_stride, a.x_view.inner_stride};
  const Rows grad_rows{a.rows, out.grad_view.inner, out.grad_view.outer_stride, out.grad_view.inner_stride};
  const T* x = static_cast<const T*>(a.x);
  const T* grad = static_cast<const T*>(out.grad);
  T* dx = static_cast<T*>(out.dx);
  F* partial = static_cast<F*>(out.partial);
  const F* statistics = static_cast<const F*>(out.statistics);
  const F* rstds = statistics + (kCentred ? 2 * a.rows : 0);
  const int64_t n = a.columns, block_rows = divide_up(a.rows, out.blocks);
  parallel_for(out.blocks, 1, divide_up(kGrain, larger(1, n * block_rows)), threads, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      F* dweight = kParameters ? partial + block * 2 * n : nullptr;
      if (kParameters)
        for (int64_t i = 0; i < 2 * n; ++i) dweight[i] = F(0);
      const int64_t end = smaller(a.rows, (block + 1) * block_rows);
      for (int64_t row = block * block_rows; row < end; ++row) {
        const Centre<F> centre = kCentred ? Centre<F>{statistics[row], statistics[a.rows + row]} : Centre<F>{};
        backward_row<kCentred, kWeight, kParameters, T, P>(n, x + x_rows.offset(row), grad + grad_rows.offset(row),
                                                           static_cast<const P*>(a.weight), centre, rstds[row],
                                                           dx ? dx + row * n : nullptr, dweight, dweight + n);
      }
    }
  });
  if (!kParameters) return;
  const auto finish = [&](const F* block_sums, P* gradient) {
    if (!gradient) return;
    parallel_for(n, 64, divide_up(kGrain, out.blocks), threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double total = 0;
        for (int64_t block = 0; block < out.blocks; ++block) total += double(block_sums[block * 2 * n + i]);
        store(gradient + i, F(total));
      }
    });
  };
  finish(partial, static_cast<P*>(out.dweight));
  finish(partial + n, static_cast<P*>(out.dbias));
}

// Calls body(Type<T>, Type<P>) with the types of x and of the parameters: the same, or float32 beside a 16-bit x.
template <class Body>
static void with_types(const NormArguments& a, const Body& body) {
  with_dtype(a.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (sizeof(T) == 2 && a.parameter_dtype == kFloat32)
      body(type, Type<float>{});
    else
      body(type, type);
  });
}

void norm_forward(const NormArguments& a, void* y, void* statistics, bool recompute, int threads) {
  with_types(a, [&](auto type, auto parameter_type) {
    using T = typename decltype(type)::type;
    using P = typename decltype(parameter_type)::type;
    const auto run = a.kind == kLayerNorm ? forward_rows<true, T, P> : forward_rows<false, T, P>;
    run(a, static_cast<T*>(y), static_cast<arithmetic<T>*>(statistics), recompute, threads);
  });
}

void norm_backward(const NormArguments& a, const NormGradients& out, int threads) {
  with_types(a, [&](auto type, auto parameter_type) {
    using T = typename decltype(type)::type;
    using P = typename decltype(parameter_type)::type;
    using Run = void (*)(const NormArguments&, const NormGradients&, int);
    static constexpr Run table[2][2][2] = {
        {{backward_rows<false, false, false, T, P>, backward_rows<false, false, true, T, P>},
         {backward_rows<false, true, false, T, P>, backward_rows<false, true, true, T, P>}},
        {{backward_rows<true, false, false, T, P>, backward_rows<true, false, true, T, P>},
         {backward_rows<true, true, false, T, P>, backward_rows<true, true, true, T, P>}}};
    table[a.kind == kLayerNorm][a.weight != nullptr][out.partial != nullptr](a, out, threads);
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
