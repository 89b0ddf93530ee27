// LayerNorm (Ba et al., 2016) and RMSNorm (Zhang & Sennrich, 2019) over the last `columns` elements of each row.
//
// Statistics, per row, in float (double for double): LayerNorm keeps mean, what the mean lost to rounding, and
// rstd = 1 / sqrt(variance + eps); RMSNorm keeps rstd. Subtracting both parts of the mean keeps x - mean exact to one
// rounding however large the mean is.
// Forward reads x once from memory (the further passes over a row find it in cache) and writes y; recompute does the same
// from the saved statistics, without the passes that compute them; backward reads grad and x and writes dx: 2, 2 and 3
// elements moved per element.
// Parameter gradients: each block of rows sums into its own row of float, and the blocks are added in order in double, so the
// result depends neither on the number of threads nor on who finished first.
#include "launchers.h"
#include "parallel.h"

namespace pyckpt {
namespace PYCKPT_ISA {

static inline int64_t row_offset(const RowView& view, int64_t row) {
  return row / view.inner * view.outer_stride + row % view.inner * view.inner_stride;
}

template <class F>
struct RowStatistics {
  F mean, residual, rstd;  // the first two zero for RMSNorm
};

template <bool kCentred, class F>
PYCKPT_HD F normalised(F x, const RowStatistics<F>& row) {
  return kCentred ? ((x - row.mean) - row.residual) * row.rstd : x * row.rstd;
}

template <bool kCentred, class F>
static inline RowStatistics<F> read_statistics(const F* statistics, int64_t rows, int64_t row) {
  if (kCentred) return {statistics[row], statistics[rows + row], statistics[2 * rows + row]};
  return {F(0), F(0), statistics[row]};
}

// Two passes over the row in cache: the mean, then deviations from it. The mean of the deviations is what rounding took from
// the mean, and corrects the variance too. What happens once a row is done in double.
template <bool kCentred, class F>
static inline RowStatistics<F> compute_statistics(const F* x, int64_t n, double eps) {
  const F mean = kCentred ? sum_over<F>(n, [=](int64_t i) { return x[i]; }) / F(n) : F(0);
  const Pair<double> sums = sum_pairs_over<F>(n, [=](int64_t i) {
    const F d = kCentred ? x[i] - mean : x[i];
    return Pair<F>{d, d * d};
  });
  const double residual = kCentred ? sums.first / double(n) : 0.0;
  const double variance = sums.second / double(n) - residual * residual;
  return {mean, F(residual), F(1.0 / __builtin_sqrt((variance < 0.0 ? 0.0 : variance) + eps))};
}

template <bool kCentred, class F>
static inline void write_row(int64_t n, const F* x, const RowStatistics<F> row, const F* weight, const F* bias, F* y) {
  if (weight && bias) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = fused(normalised<kCentred>(x[i], row), weight[i], bias[i]);
  } else if (weight) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = normalised<kCentred>(x[i], row) * weight[i];
  } else if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = normalised<kCentred>(x[i], row) + bias[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = normalised<kCentred>(x[i], row);
  }
}

template <bool kCentred, class F>
static void forward_rows(const NormArguments& a, void* y, F* statistics, bool recompute, int threads) {
  const int64_t n = a.columns;
  parallel_rows(a.rows, n, threads, [&](int64_t begin, int64_t end) {
    const Scratch<F> scratch(4 * n);
    const F* weight = a.weight ? widen(a.parameter_dtype, a.weight, 0, n, scratch.at(2 * n)) : nullptr;
    const F* bias = a.bias ? widen(a.parameter_dtype, a.bias, 0, n, scratch.at(3 * n)) : nullptr;
    for (int64_t row = begin; row < end; ++row) {
      const F* x = widen(a.dtype, a.x, row_offset(a.x_view, row), n, scratch.at(0));
      if (!recompute) {
        const RowStatistics<F> computed = compute_statistics<kCentred>(x, n, a.eps);
        if (kCentred) {
          statistics[row] = computed.mean;
          statistics[a.rows + row] = computed.residual;
        }
        statistics[(kCentred ? 2 * a.rows : 0) + row] = computed.rstd;
      }
      F* out = target(a.dtype, y, row * n, scratch.at(n));
      write_row<kCentred>(n, x, read_statistics<kCentred>(statistics, a.rows, row), weight, bias, out);
      narrow(a.dtype, out, y, row * n, n);
    }
  });
}

// One row of backward. With h = (x - mean) rstd and v = grad weight:
// dx = rstd (v - mean(v) - h mean(v h)), without mean(v) for RMSNorm; dweight += grad h; dbias += grad.
// The sums and both parameter gradients come from one pass, dx from a second over the row in cache.
template <bool kCentred, bool kWeight, bool kParameters, class F>
static inline void backward_row(int64_t n, const F* x, const F* grad, const F* weight, const RowStatistics<F> row, double eps,
                                F* dx, F* dweight, F* dbias) {
  const Pair<double> sums = sum_pairs_over<F>(n, [=](int64_t i) {
    const F g = grad[i], h = normalised<kCentred>(x[i], row), v = kWeight ? g * weight[i] : g;
    if (kParameters) {
      dweight[i] = fused(g, h, dweight[i]);
      if (kCentred) dbias[i] += g;
    }
    return Pair<F>{v * h, v};
  });
  if (!dx) return;
  if (n == 1) {  // LayerNorm: constant, gradient 0 (NaN where x is). RMSNorm: v (1 - h^2) = v eps rstd^2, without cancellation
    const double rstd = double(row.rstd);
    dx[0] = F(kCentred ? 0.0 * rstd : sums.second * eps * rstd * rstd * rstd);
    return;
  }
  const F along = F(sums.first / double(n)), level = kCentred ? F(sums.second / double(n)) : F(0), rstd = row.rstd;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const F centred = kWeight ? fused(grad[i], weight[i], -level) : grad[i] - level;
    dx[i] = rstd * fused(-normalised<kCentred>(x[i], row), along, centred);
  }
}

// gradient[i] = sum over blocks of sums[block * 2 n + i], in order.
template <class F>
static void add_blocks(const F* sums, int64_t blocks, int64_t n, int dtype, void* gradient, int threads) {
  if (!gradient) return;
  constexpr int64_t kColumns = 256;
  parallel_for(n, kColumns, divide_up(kGrain, blocks), threads, [&](int64_t begin, int64_t end) {
    double total[kColumns];
    F wide[kColumns];
    for (int64_t start = begin; start < end; start += kColumns) {
      const int64_t count = smaller(kColumns, end - start);
      for (int64_t i = 0; i < count; ++i) total[i] = 0;
      for (int64_t block = 0; block < blocks; ++block) {
        const F* from = sums + block * 2 * n + start;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) total[i] += double(from[i]);
      }
      F* out = target(dtype, gradient, start, wide);
      for (int64_t i = 0; i < count; ++i) out[i] = F(total[i]);
      narrow(dtype, out, gradient, start, count);
    }
  });
}

template <bool kCentred, bool kWeight, bool kParameters, class F>
static void backward_rows(const NormArguments& a, const NormGradients& out, int threads) {
  F* partial = static_cast<F*>(out.partial);
  const F* statistics = static_cast<const F*>(out.statistics);
  const int64_t n = a.columns, block_rows = divide_up(a.rows, out.blocks);
  parallel_rows(out.blocks, n * block_rows, threads, [&](int64_t first, int64_t last) {
    const Scratch<F> scratch(4 * n);
    const F* weight = kWeight ? widen(a.parameter_dtype, a.weight, 0, n, scratch.at(3 * n)) : nullptr;
    for (int64_t block = first; block < last; ++block) {
      F* dweight = kParameters ? partial + block * 2 * n : nullptr;
      F* dbias = kParameters ? dweight + n : nullptr;
      if (kParameters)
        for (int64_t i = 0; i < 2 * n; ++i) dweight[i] = F(0);
      const int64_t end = smaller(a.rows, (block + 1) * block_rows);
      for (int64_t row = block * block_rows; row < end; ++row) {
        const F* x = widen(a.dtype, a.x, row_offset(a.x_view, row), n, scratch.at(0));
        const F* grad = widen(a.dtype, out.grad, row_offset(out.grad_view, row), n, scratch.at(n));
        F* dx = out.dx ? target(a.dtype, out.dx, row * n, scratch.at(2 * n)) : nullptr;
        backward_row<kCentred, kWeight, kParameters>(n, x, grad, weight, read_statistics<kCentred>(statistics, a.rows, row),
                                                     a.eps, dx, dweight, dbias);
        if (dx) narrow(a.dtype, dx, out.dx, row * n, n);
      }
    }
  });
  if (!kParameters) return;
  add_blocks(partial, out.blocks, n, a.parameter_dtype, out.dweight, threads);
  add_blocks(partial + n, out.blocks, n, a.parameter_dtype, out.dbias, threads);
}

void norm_forward(const NormArguments& a, void* y, void* statistics, bool recompute, int threads) {
  with_arithmetic(a.dtype, [&](auto type) {
    using F = typename decltype(type)::type;
    const auto run = a.kind == kLayerNorm ? forward_rows<true, F> : forward_rows<false, F>;
    run(a, y, static_cast<F*>(statistics), recompute, threads);
  });
}

void norm_backward(const NormArguments& a, const NormGradients& out, int threads) {
  with_arithmetic(a.dtype, [&](auto type) {
    using F = typename decltype(type)::type;
    using Run = void (*)(const NormArguments&, const NormGradients&, int);
    static constexpr Run table[2][2][2] = {
        {{backward_rows<false, false, false, F>, backward_rows<false, false, true, F>},
         {backward_rows<false, true, false, F>, backward_rows<false, true, true, F>}},
        {{backward_rows<true, false, false, F>, backward_rows<true, false, true, F>},
         {backward_rows<true, true, false, F>, backward_rows<true, true, true, F>}}};
    table[a.kind == kLayerNorm][a.weight != nullptr][out.partial != nullptr](a, out, threads);
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
