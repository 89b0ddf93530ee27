// LayerNorm (Ba et al., 2016) and RMSNorm (Zhang & Sennrich, 2019) over the last `columns` elements of each row.
//
// Statistics, per row, in float (double for double): LayerNorm keeps mean, what the mean lost to rounding, and
// rstd = 1 / sqrt(variance + eps); RMSNorm keeps rstd.
// Forward reads x once from memory (the further passes over a row find it in cache) and writes y; recompute does the same
// from the saved statistics, without the passes that compute them; backward reads grad and x and writes dx: 2, 2 and 3
// elements moved per element.
// Parameter gradients: each block of rows sums into its own row of double, and the blocks are added in order, so the result
// depends neither on the number of threads nor on who finished first.
#include "launchers.h"
#include "parallel.h"
#include "rows.h"

namespace pyckpt {
namespace PYCKPT_ISA {

static inline int64_t row_offset(const RowView& view, int64_t row) {
  return row / view.inner * view.outer_stride + row % view.inner * view.inner_stride;
}

template <bool kCentred, class F>
static inline RowStatistics<F> read_statistics(const F* statistics, int64_t rows, int64_t row) {
  if (kCentred) return {statistics[row], statistics[rows + row], statistics[2 * rows + row]};
  return {F(0), F(0), statistics[row]};
}

// Mean and variance in one pass over deviations from a first guess at the mean; what happens once a row is done in double.
// The guess is the mean of the first elements. Where it is so far off (beyond 4 standard deviations) that the variance would
// lose digits, the mean found replaces it in a second pass. RMSNorm's "deviations" are from 0.
template <bool kCentred, class Reader, int kRows>
static inline auto compute_statistics(const Reader x, int64_t n, double eps, const Ahead (&ahead)[kRows]) {
  using F = typename Reader::Value;
  F guess = F(0);
  if (kCentred) {
    const int64_t few = smaller(n, 16);
    for (int64_t i = 0; i < few; ++i) guess += x(i);
    guess /= F(few);
  }
  double shift = 0, variance = 0;
  for (int pass = 0; pass < 2; ++pass) {
    const auto term = [=](int64_t i) {
      const F d = kCentred ? x(i) - guess : x(i);
      return Pair<F>{d, d * d};
    };
    const Pair<double> sums = sum_pairs_over<F>(n, term, ahead);
    shift = kCentred ? sums.first / double(n) : 0.0;
    variance = sums.second / double(n) - shift * shift;
    if (shift * shift <= 16 * variance || pass == 1) break;
    guess = F(double(guess) + shift);
  }
  return rounded_statistics<F>(double(guess) + shift, variance, eps);
}

template <bool kCentred, class Reader>
static void forward_rows(const NormArguments& a, void* y, typename Reader::Value* statistics, bool recompute, int threads) {
  using F = typename Reader::Value;
  const int64_t n = a.columns;
  parallel_rows(a.rows, n, threads, [&](int64_t begin, int64_t end) {
    const Scratch<F> scratch(3 * n);
    const F* weight = a.weight ? widen(a.parameter_dtype, a.weight, 0, n, scratch.at(n)) : nullptr;
    const F* bias = a.bias ? widen(a.parameter_dtype, a.bias, 0, n, scratch.at(2 * n)) : nullptr;
    for (int64_t row = begin; row < end; ++row) {
      const Reader x(a.dtype, a.x, row_offset(a.x_view, row), n, scratch.at(0));
      if (!recompute) {
        const Ahead ahead[] = {{a.dtype, a.x, row_offset(a.x_view, smaller(row + 1, end - 1))}, {a.dtype, y, row * n}};
        const RowStatistics<F> computed = compute_statistics<kCentred>(x, n, a.eps, ahead);
        if (kCentred) {
          statistics[row] = computed.mean;
          statistics[a.rows + row] = computed.residual;
        }
        statistics[(kCentred ? 2 * a.rows : 0) + row] = computed.rstd;
      }
      const RowStatistics<F> saved = read_statistics<kCentred>(statistics, a.rows, row);
      const F mean = saved.mean, rstd = saved.rstd, shift = shift_of(saved);
      // y = finish(i, normalised x)
      const auto write_row = [&](const auto& finish) {
        write<F>(a.dtype, y, row * n, n, [=](int64_t start, int64_t count, F* out) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[i] = finish(start + i, normalised<kCentred>(x(start + i), mean, rstd, shift));
        });
      };
      if (weight && bias)
        write_row([=](int64_t i, F h) { return fused(h, weight[i], bias[i]); });
      else if (weight)
        write_row([=](int64_t i, F h) { return h * weight[i]; });
      else if (bias)
        write_row([=](int64_t i, F h) { return h + bias[i]; });
      else
        write_row([](int64_t, F h) { return h; });
    }
  });
}

// Backward. With h = (x - mean) rstd and v = grad weight:
// dx = rstd (v - mean(v) - h mean(v h)), without mean(v) for RMSNorm; dweight = sum of grad h, dbias = sum of grad over
// rows. A first pass over kRows rows side by side gives the sums of v h and v and adds to the parameter gradients: side by
// side, because the gradients then cost one load and store for all the rows. A second pass, in cache, writes dx, for which the
// first asks ahead.
constexpr int kGroup = 4;      // rows side by side
constexpr int kRun = 16;       // rows whose parameter gradients are summed in F before they are added in double
constexpr int64_t kStep = 16;  // elements of a row at once; lane j sums elements j, j + kStep, ...

template <int kRows, bool kCentred, bool kWeight, bool kParameters, class Reader, class F>
static inline void reduce_rows(int64_t n, const Reader* x, const Reader* grad, const F* weight, const RowStatistics<F>* rows,
                               F* dweight, F* dbias, Pair<double>* sums, const Ahead& ahead) {
  F mean[kRows], rstd[kRows], shift[kRows];
  for (int k = 0; k < kRows; ++k) {
    sums[k] = {0, 0};
    mean[k] = rows[k].mean;
    rstd[k] = rows[k].rstd;
    shift[k] = shift_of(rows[k]);
  }
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t end = smaller(n, start + kChunk);
    F along[kRows][kStep] = {}, level[kRows][kStep] = {};
    const auto visit = [&](int64_t i, int64_t j) {
      const F w = kWeight ? weight[i] : F(1);
      F by_h[kRows], by_one[kRows];
#pragma GCC unroll 4
      for (int k = 0; k < kRows; ++k) {
        const F g = grad[k](i), h = normalised<kCentred>(x[k](i), mean[k], rstd[k], shift[k]), v = kWeight ? g * w : g;
        along[k][j] = fused(v, h, along[k][j]);
        if (kCentred) level[k][j] += v;
        by_h[k] = g * h;
        by_one[k] = g;
      }
      if (kParameters) {
        dweight[i] += kRows == 4 ? (by_h[0] + by_h[1 % kRows]) + (by_h[2 % kRows] + by_h[3 % kRows]) : by_h[0];
        if (kCentred)
          dbias[i] += kRows == 4 ? (by_one[0] + by_one[1 % kRows]) + (by_one[2 % kRows] + by_one[3 % kRows]) : by_one[0];
      }
    };
    int64_t i = start;
    for (; i + kStep <= end; i += kStep) {
      ahead.fetch(kRows * i, kRows * kStep);
#pragma omp simd
      for (int64_t j = 0; j < kStep; ++j) visit(i + j, j);
    }
    for (int64_t j = 0; j < end - i; ++j) visit(i + j, j);
    for (int k = 0; k < kRows; ++k) {
      sums[k].first += double(fold16(along[k], Add{}));
      if (kCentred) sums[k].second += double(fold16(level[k], Add{}));
    }
  }
}

template <bool kCentred, bool kWeight, class Reader, class F>
static inline void input_gradient(int64_t n, const Reader x, const Reader grad, const F* weight, const RowStatistics<F> row,
                                  const Pair<double> sums, double eps, int dtype, void* dx, int64_t offset) {
  const F mean = row.mean, rstd = row.rstd, shift = shift_of(row);
  if (n == 1) {
    const F one = norm_gradient_of_one<kCentred>(kWeight ? grad(0) * weight[0] : grad(0), rstd, eps);
    return store(dtype, &one, dx, offset, 1);
  }
  const F along = F(sums.first / double(n)), level = kCentred ? F(sums.second / double(n)) : F(0);
  write<F>(dtype, dx, offset, n, [=](int64_t start, int64_t count, F* out) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const F h = normalised<kCentred>(x(start + i), mean, rstd, shift);
      out[i] = norm_gradient<kWeight>(h, grad(start + i), kWeight ? weight[start + i] : F(1), rstd, along, level);
    }
  });
}

template <class F>
static inline void flush(F* run, double* sums, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    sums[i] += double(run[i]);
    run[i] = F(0);
  }
}

// gradient[i] = sum over blocks of sums[block * 2 n + i], in order.
template <class F>
static void add_blocks(const double* sums, int64_t blocks, int64_t n, int dtype, void* gradient, int threads) {
  if (!gradient) return;
  constexpr int64_t kColumns = 256;
  parallel_for(n, kColumns, divide_up(kGrain, blocks), threads, [&](int64_t begin, int64_t end) {
    double total[kColumns];
    F wide[kColumns];
    for (int64_t start = begin; start < end; start += kColumns) {
      const int64_t count = smaller(kColumns, end - start);
      for (int64_t i = 0; i < count; ++i) total[i] = 0;
      for (int64_t block = 0; block < blocks; ++block) {
        const double* from = sums + block * 2 * n + start;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) total[i] += from[i];
      }
      F* out = target(dtype, gradient, start, wide);
      for (int64_t i = 0; i < count; ++i) out[i] = F(total[i]);
      narrow(dtype, out, gradient, start, count);
    }
  });
}

template <bool kCentred, bool kWeight, bool kParameters, class Reader>
static void backward_rows(const NormArguments& a, const NormGradients& out, int threads) {
  using F = typename Reader::Value;
  double* partial = static_cast<double*>(out.partial);
  const F* statistics = static_cast<const F*>(out.statistics);
  const int64_t n = a.columns, block_rows = divide_up(a.rows, out.blocks);
  parallel_rows(out.blocks, n * block_rows, threads, [&](int64_t first, int64_t last) {
    const Scratch<F> scratch((2 * kGroup + 3) * n);
    F* run = scratch.at((2 * kGroup + 1) * n);  // dweight, then dbias
    const F* weight = kWeight ? widen(a.parameter_dtype, a.weight, 0, n, scratch.at(2 * kGroup * n)) : nullptr;
    for (int64_t block = first; block < last; ++block) {
      double* sums = kParameters ? partial + block * 2 * n : nullptr;
      for (int64_t i = 0; kParameters && i < 2 * n; ++i) {
        sums[i] = 0;
        run[i] = 0;
      }
      const int64_t begin = block * block_rows, end = smaller(a.rows, begin + block_rows);
      for (int64_t row = begin; row < end; row += kGroup) {
        const int count = int(smaller(kGroup, end - row));
        Reader x[kGroup], grad[kGroup];
        RowStatistics<F> rows[kGroup];
        for (int k = 0; k < count; ++k) {
          x[k] = Reader(a.dtype, a.x, row_offset(a.x_view, row + k), n, scratch.at(k * n));
          grad[k] = Reader(a.dtype, out.grad, row_offset(out.grad_view, row + k), n, scratch.at((kGroup + k) * n));
          rows[k] = read_statistics<kCentred>(statistics, a.rows, row + k);
        }
        Pair<double> row_sums[kGroup];
        const Ahead ahead(a.dtype, out.dx ? out.dx : out.grad, row * n);
        if (count == kGroup)
          reduce_rows<kGroup, kCentred, kWeight, kParameters>(n, x, grad, weight, rows, run, run + n, row_sums, ahead);
        else
          for (int k = 0; k < count; ++k)
            reduce_rows<1, kCentred, kWeight, kParameters>(n, x + k, grad + k, weight, rows + k, run, run + n, row_sums + k,
                                                           ahead);
        if (kParameters && ((row - begin) % kRun == kRun - kGroup || row + count == end)) flush(run, sums, 2 * n);
        for (int k = 0; out.dx && k < count; ++k)
          input_gradient<kCentred, kWeight>(n, x[k], grad[k], weight, rows[k], row_sums[k], a.eps, a.dtype, out.dx,
                                            (row + k) * n);
      }
    }
  });
  if (!kParameters) return;
  add_blocks<F>(partial, out.blocks, n, a.parameter_dtype, out.dweight, threads);
  add_blocks<F>(partial + n, out.blocks, n, a.parameter_dtype, out.dbias, threads);
}

void norm_forward(const NormArguments& a, void* y, void* statistics, bool recompute, int threads) {
  with_reader(a.dtype, [&](auto type) {
    using Reader = typename decltype(type)::type;
    const auto run = a.kind == kLayerNorm ? forward_rows<true, Reader> : forward_rows<false, Reader>;
    run(a, y, static_cast<typename Reader::Value*>(statistics), recompute, threads);
  });
}

void norm_backward(const NormArguments& a, const NormGradients& out, int threads) {
  with_reader(a.dtype, [&](auto type) {
    using Reader = typename decltype(type)::type;
    using Run = void (*)(const NormArguments&, const NormGradients&, int);
    static constexpr Run table[2][2][2] = {
        {{backward_rows<false, false, false, Reader>, backward_rows<false, false, true, Reader>},
         {backward_rows<false, true, false, Reader>, backward_rows<false, true, true, Reader>}},
        {{backward_rows<true, false, false, Reader>, backward_rows<true, false, true, Reader>},
         {backward_rows<true, true, false, Reader>, backward_rows<true, true, true, Reader>}}};
    table[a.kind == kLayerNorm][a.weight != nullptr][out.partial != nullptr](a, out, threads);
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
