// LayerNorm (Ba et al., 2016) and RMSNorm (Zhang & Sennrich, 2019) over the last `columns` elements of each row.
//
// Statistics as csrc/cpu/norm.cpp keeps them. Elements moved per element: forward 2 (x, y), recompute 2, backward 3 (grad, x,
// dx), with parameter gradients too, plus two numbers a column for each block of rows; rows too long for registers are read once
// more for each sum, from the second-level cache as far as it holds them.
// Parameter gradients: each block of rows writes its sums to a row of `partial`, which a second kernel adds up in order: no
// atomics, and what a sum holds depends on shapes alone.
#include "common.cuh"

namespace pyckpt {
namespace cuda {

template <class T>
struct NormRows {  // NormArguments with types
  using F = typename Element<T>::F;
  int64_t rows, columns;
  double inverse, eps;  // 1 / columns
  const T* x;
  RowView x_view;
  const void *weight, *bias;
  bool float_parameters;  // else of type T
  const F* statistics;
};

PYCKPT_DEVICE int64_t row_offset(const RowView& view, int64_t row) {
  if (view.inner == 1) return row * view.outer_stride;
  const Division at = divide(row, view.inner);
  return at.quotient * view.outer_stride + at.remainder * view.inner_stride;
}

template <bool kCentred, class F>
PYCKPT_DEVICE RowStatistics<F> read_statistics(const F* statistics, int64_t rows, int64_t row) {
  if (kCentred) return {statistics[row], statistics[rows + row], statistics[2 * rows + row]};
  return {F(0), F(0), statistics[row]};
}

// kVector parameters from `column` on.
template <class L>
PYCKPT_DEVICE void parameters(const void* base, bool is_float, int64_t column, int valid, typename L::F (&values)[L::kElements]) {
  using T = typename L::T;
  if constexpr (sizeof(T) == 2) {
    if (is_float) {
      const float* from = static_cast<const float*>(base) + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float four[4];
        widen<float>(load<L::kWide>(from + 4 * half, valid - 4 * half), four);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[4 * half + i] = four[i];
      }
      return;
    }
  }
  widen<T>(load<L::kWide>(static_cast<const T*>(base) + column, valid), values);
}

// Mean and variance of a row by two passes over registers. The first sums deviations from the row's first element, so that
// what a mean far from zero has in common is gone before anything is rounded.
template <class L, bool kCentred>
PYCKPT_DEVICE RowStatistics<typename L::F> compute_statistics(const NormRows<typename L::T>& a, const Row<L>& row, int64_t offset,
                                                              int64_t n, int& phase) {
  using F = typename L::F;
  double mean = 0;
  F high = 0, low = 0;
  if constexpr (kCentred) {
    const F guess = Element<typename L::T>::widen(a.x[offset]);
    Part<typename L::T> sum;
    L::each_chunk(n, [&](int slot, int64_t column, int valid) {
      F x[L::kElements];
      row.get(slot, column, valid, x);
#pragma unroll
      for (int i = 0; i < L::kElements; ++i)
        if (i < valid) sum.add(x[i] - guess);
    });
    mean = double(guess) + rounded(reduce(sum.value(), Add{}, phase)) * a.inverse;
    high = F(mean), low = F(mean - double(high));
  }
  Part<typename L::T> squares;
  L::each_chunk(n, [&](int slot, int64_t column, int valid) {
    F x[L::kElements];
    row.get(slot, column, valid, x);
#pragma unroll
    for (int i = 0; i < L::kElements; ++i) {
      const F d = kCentred ? (x[i] - high) - low : x[i];
      if (i < valid) squares.add(d, d);
    }
  });
  return rounded_statistics<F>(mean, rounded(reduce(squares.value(), Add{}, phase)) * a.inverse, a.eps);
}

template <class L, bool kCentred>
__global__ void __launch_bounds__(kLargestTeam, 1)
    norm_forward_kernel(const NormRows<typename L::T> a, typename L::T* y, typename L::F* statistics, bool recompute) {
  using F = typename L::F;
  int phase = 0;
  L::each_row(a.rows, a.columns, [&](int64_t r, int64_t n) {
    const int64_t offset = row_offset(a.x_view, r);
    const Row<L> row(a.x + offset, n);
    RowStatistics<F> s;
    if (recompute) {
      s = read_statistics<kCentred>(a.statistics, a.rows, r);
    } else {
      s = compute_statistics<L, kCentred>(a, row, offset, n, phase);
      if (threadIdx.x == 0 && n) {
        if (kCentred) {
          statistics[r] = s.mean;
          statistics[a.rows + r] = s.residual;
        }
        statistics[(kCentred ? 2 * a.rows : 0) + r] = s.rstd;
      }
    }
    const F shift = shift_of(s);
    L::each_chunk(n, [&](int slot, int64_t column, int valid) {
      F h[L::kElements], p[L::kElements];
      row.get(slot, column, valid, h);
#pragma unroll
      for (int i = 0; i < L::kElements; ++i) h[i] = normalised<kCentred>(h[i], s.mean, s.rstd, shift);
      if (a.weight) {
        F w[L::kElements];
        parameters<L>(a.weight, a.float_parameters, column, valid, w);
        if (a.bias) parameters<L>(a.bias, a.float_parameters, column, valid, p);
#pragma unroll
        for (int i = 0; i < L::kElements; ++i) h[i] = a.bias ? fused(h[i], w[i], p[i]) : h[i] * w[i];
      } else if (a.bias) {
        parameters<L>(a.bias, a.float_parameters, column, valid, p);
#pragma unroll
        for (int i = 0; i < L::kElements; ++i) h[i] += p[i];
      }
      store<L::kWide>(y + r * a.columns + column, valid, h);
    });
  });
}

// Backward. With h = (x - mean) rstd and v = grad weight: dx = rstd (v - mean(v) - h mean(v h)), without mean(v) for RMSNorm;
// dweight = sum of grad h, dbias = sum of grad over rows.
template <class T>
struct NormBackwardRows {
  using F = typename Element<T>::F;
  const T* grad;
  RowView grad_view;
  T* dx;
  F* partial;  // blocks x 2 x columns
  int64_t block_rows, blocks;
};

// Sums go no nearer than the second-level cache, where the kernel that adds them reads them.
template <bool kWide, class F, int kElements>
PYCKPT_DEVICE void store_sums(F* to, int valid, const F (&sums)[kElements]) {
  if constexpr (kWide) {
#pragma unroll
    for (int at = 0; at < kElements; at += 4) {
      const float four[4] = {sums[at], sums[at + 1], sums[at + 2], sums[at + 3]};
      __stcg(reinterpret_cast<uint4*>(to + at), packed(four, Type<float>{}));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      if (i < valid) to[i] = sums[i];
  }
}

// A team takes a block of rows. With kParameters its threads keep the sums of their columns in registers.
template <class L, bool kCentred, bool kParameters>
__global__ void __launch_bounds__(kLargestTeam, 1)
    norm_backward_kernel(const NormRows<typename L::T> a, const NormBackwardRows<typename L::T> b) {
  using F = typename L::F;
  constexpr int V = L::kElements;
  int phase = 0;
  L::each_row(b.blocks, a.columns, [&](int64_t block, int64_t columns) {
    F dweight[L::kSlots][V] = {}, dbias[L::kSlots][V] = {};
    for (int64_t i = 0; i < b.block_rows; ++i) {  // as many for every team of a block
      const int64_t r = smaller(block * b.block_rows + i, a.rows - 1), n = block * b.block_rows + i < a.rows ? columns : 0;
      const Row<L> x(a.x + row_offset(a.x_view, r), n), grad(b.grad + row_offset(b.grad_view, r), n);
      const RowStatistics<F> s = read_statistics<kCentred>(a.statistics, a.rows, r);
      const F shift = shift_of(s);
      Part<typename L::T> along, level;
      L::each_chunk(n, [&](int slot, int64_t column, int valid) {
        F h[V], g[V], w[V];
        x.get(slot, column, valid, h);
        grad.get(slot, column, valid, g);
        if (a.weight) parameters<L>(a.weight, a.float_parameters, column, valid, w);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (i >= valid) continue;
          h[i] = normalised<kCentred>(h[i], s.mean, s.rstd, shift);
          const F v = a.weight ? g[i] * w[i] : g[i];
          along.add(v, h[i]);
          if (kCentred) level.add(v);
          if (kParameters) {
            dweight[slot][i] = fused(g[i], h[i], dweight[slot][i]);
            if (kCentred) dbias[slot][i] += g[i];
          }
        }
      });
      F along_mean, level_mean = 0;
      if constexpr (kCentred) {
        using Value = decltype(along.value());
        const auto sums = reduce(Both<Value, Value>{along.value(), level.value()}, Add{}, phase);
        along_mean = F(rounded(sums.first) * a.inverse);
        level_mean = F(rounded(sums.second) * a.inverse);
      } else {
        along_mean = F(rounded(reduce(along.value(), Add{}, phase)) * a.inverse);
      }
      L::each_chunk(n, [&](int slot, int64_t column, int valid) {
        F h[V], g[V], w[V];
        x.get(slot, column, valid, h);
        grad.get(slot, column, valid, g);
        if (a.weight) parameters<L>(a.weight, a.float_parameters, column, valid, w);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          h[i] = normalised<kCentred>(h[i], s.mean, s.rstd, shift);
          if (a.columns == 1)
            h[i] = norm_gradient_of_one<kCentred>(a.weight ? g[i] * w[i] : g[i], s.rstd, a.eps);
          else
            h[i] = a.weight ? norm_gradient<true>(h[i], g[i], w[i], s.rstd, along_mean, level_mean)
                            : norm_gradient<false>(h[i], g[i], F(1), s.rstd, along_mean, level_mean);
        }
        store<L::kWide>(b.dx + r * a.columns + column, valid, h);
      });
    }
    if constexpr (kParameters)
      L::each_chunk(columns, [&](int slot, int64_t column, int valid) {
        F* to = b.partial + block * 2 * a.columns + column;
        store_sums<L::kWide>(to, valid, dweight[slot]);
        if (kCentred) store_sums<L::kWide>(to + a.columns, valid, dbias[slot]);
      });
  });
}

// The same sums for rows too long to keep them, or where dx is not wanted: a thread goes down kVector columns of a block of rows.
constexpr int kColumnThreads = 128;
template <class T, bool kWide, bool kCentred>
__global__ void __launch_bounds__(kColumnThreads, 1)
    norm_parameters_kernel(const NormRows<T> a, const NormBackwardRows<T> b, int64_t blocks_across) {
  using F = typename Element<T>::F;
  constexpr int V = kVector<T>;
  const Division at = divide(int64_t(blockIdx.x), blocks_across);
  const int64_t block = at.quotient, column = (at.remainder * kColumnThreads + threadIdx.x) * V;
  if (column >= a.columns) return;
  const int valid = int(smaller(V, a.columns - column));
  F dweight[V] = {}, dbias[V] = {};
  const int64_t end = smaller(a.rows, (block + 1) * b.block_rows);
#pragma unroll 4
  for (int64_t r = block * b.block_rows; r < end; ++r) {
    F x[V], g[V];
    widen<T>(load<kWide>(a.x + row_offset(a.x_view, r) + column, valid), x);
    widen<T>(load<kWide>(b.grad + row_offset(b.grad_view, r) + column, valid), g);
    const RowStatistics<F> s = read_statistics<kCentred>(a.statistics, a.rows, r);
    const F shift = shift_of(s);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      dweight[i] = fused(g[i], normalised<kCentred>(x[i], s.mean, s.rstd, shift), dweight[i]);
      if (kCentred) dbias[i] += g[i];
    }
  }
  F* to = b.partial + block * 2 * a.columns + column;
  store_sums<kWide>(to, valid, dweight);
  if (kCentred) store_sums<kWide>(to + a.columns, valid, dbias);
}

// gradient[i] = sum over blocks of sums[block * 2 columns + i], in double: kReduceRows partial sums side by side, then those in
// order. Reads what the blocks have written, and writes one number a column.
constexpr int kReduceRows = 16;
template <class P, class F>
__global__ void __launch_bounds__(32 * kReduceRows)
    add_blocks_kernel(const F* sums, int64_t blocks, int64_t columns, P* gradient) {
  SIMT_SHARED(double, parts, [kReduceRows][33]);
  const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x;
  double total = 0;
  if (column < columns)
    for (int64_t block = threadIdx.y; block < blocks; block += kReduceRows) total += double(sums[block * 2 * columns + column]);
  parts[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  total = 0;
  for (int i = 0; i < kReduceRows; ++i) total += parts[i][threadIdx.x];
  gradient[column] = Element<P>::narrow(typename Element<P>::F(total));
}

template <class F>
static void add_blocks(const F* sums, int64_t blocks, int64_t columns, int dtype, void* gradient, simt::Stream stream) {
  if (!gradient) return;
  with_type(dtype, false, [&](auto type, auto) {
    using P = typename decltype(type)::type;
    simt::launch(add_blocks_kernel<P, F>, simt::Grid(divide_up(columns, 32)), dim3(32, kReduceRows), 0, stream, sums, blocks,
                 columns, static_cast<P*>(gradient));
  });
}

template <class T>
static NormRows<T> typed(const NormArguments& a, const void* statistics) {
  return {a.rows,
          a.columns,
          1.0 / double(a.columns),
          a.eps,
          static_cast<const T*>(a.x),
          a.x_view,
          a.weight,
          a.bias,
          a.parameter_dtype == kFloat32,
          static_cast<const typename Element<T>::F*>(statistics)};
}

static bool whole_vectors(const RowView& view, int64_t vector) {
  return view.outer_stride % vector == 0 && view.inner_stride % vector == 0;
}

void norm_forward(const NormArguments& a, void* y, void* statistics, bool recompute, Where where) {
  const int64_t vector = vector_size(a.dtype);
  const bool wide = a.columns % vector == 0 && whole_vectors(a.x_view, vector) && aligned(a.x, a.weight, a.bias, y);
  with_type(a.dtype, wide, [&](auto type, auto kWide) {
    using T = typename decltype(type)::type;
    with_layout<T, kWide.value, 4>(a.columns, [&](auto layout) {
      using L = decltype(layout);
      const auto kernel = a.kind == kLayerNorm ? norm_forward_kernel<L, true> : norm_forward_kernel<L, false>;
      simt::launch(kernel, L::grid(a.columns ? a.rows : 0, a.columns), L::block(a.columns), 0,
                   simt::Stream{where.first, where.second}, typed<T>(a, statistics), static_cast<T*>(y),
                   static_cast<typename L::F*>(statistics), recompute);
    });
  });
}

template <class T, bool kWide, bool kCentred>
static void backward(const NormArguments& a, const NormGradients& out, simt::Stream stream) {
  using F = typename Element<T>::F;
  const NormRows<T> rows = typed<T>(a, out.statistics);
  NormBackwardRows<T> b{static_cast<const T*>(out.grad), out.grad_view, static_cast<T*>(out.dx), static_cast<F*>(out.partial),
                        divide_up(a.rows, out.blocks),   out.blocks};
  bool parameters_done = false;
  if (out.dx && out.partial) {
    using L = Layout<T, 2, kWide>;
    if (L::fits(a.columns)) {
      simt::launch(norm_backward_kernel<L, kCentred, true>, L::grid(b.blocks, a.columns), L::block(a.columns), 0, stream, rows,
                   b);
      parameters_done = true;
    }
  }
  if (out.dx && !parameters_done) {
    with_layout<T, kWide, 2, 4>(a.columns, [&](auto layout) {
      using L = decltype(layout);
      NormBackwardRows<T> each = b;
      each.block_rows = 1, each.blocks = a.rows;
      simt::launch(norm_backward_kernel<L, kCentred, false>, L::grid(a.rows, a.columns), L::block(a.columns), 0, stream, rows,
                   each);
    });
  }
  if (!out.partial) return;
  if (!parameters_done) {
    const int64_t across = divide_up(a.columns, kVector<T> * kColumnThreads);
    simt::launch(norm_parameters_kernel<T, kWide, kCentred>, simt::Grid(across * b.blocks), dim3(kColumnThreads), 0, stream, rows,
                 b, across);
  }
  add_blocks(b.partial, b.blocks, a.columns, a.parameter_dtype, out.dweight, stream);
  add_blocks(b.partial + a.columns, kCentred ? b.blocks : 0, a.columns, a.parameter_dtype, out.dbias, stream);
}

void norm_backward(const NormArguments& a, const NormGradients& out, Where where) {
  if (a.columns == 0) return;
  const int64_t vector = vector_size(a.dtype);
  const bool wide = a.columns % vector == 0 && whole_vectors(a.x_view, vector) && whole_vectors(out.grad_view, vector) &&
                    aligned(a.x, a.weight, out.grad, out.dx, out.partial);
  with_type(a.dtype, wide, [&](auto type, auto kWide) {
    using T = typename decltype(type)::type;
    const auto run = a.kind == kLayerNorm ? backward<T, kWide.value, true> : backward<T, kWide.value, false>;
    run(a, out, simt::Stream{where.first, where.second});
  });
}

}  // namespace cuda
}  // namespace pyckpt
