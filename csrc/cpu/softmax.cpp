// Softmax over the last dimension of scale * x + mask, with causal limit and dropout, in one pass over memory.
//
// Without dropout, backward reads the output (which a following matrix product keeps anyway). With dropout it reads x and two
// numbers a row, the maximum and 1 / sum: the probabilities, the mask and their product are never stored.
// Forward moves 2 elements per element (+ the mask), backward 3. Rows are staged in float, so a row costs 4 bytes a column
// of scratch per thread.
#include "launchers.h"
#include "random.h"

namespace pyckpt {
namespace PYCKPT_ISA {

struct RowCursor {  // where row `row` of the leading dimensions starts in x, in the mask and in another operand
  int64_t x, mask, other, query;
};

static inline RowCursor locate(const SoftmaxArguments& a, const int64_t* other_strides, int64_t row) {
  RowCursor at{0, 0, 0, 0};
  for (int64_t d = a.dims - 1; d >= 0; --d) {
    const int64_t index = row % a.sizes[d];
    row /= a.sizes[d];
    at.x += index * a.x_strides[d];
    if (a.mask.kind) at.mask += index * a.mask.row_strides[d];
    if (other_strides) at.other += index * other_strides[d];
    if (d == a.dims - 1) at.query = index;
  }
  return at;
}

static inline int64_t row_count(const SoftmaxArguments& a) {
  int64_t rows = 1;
  for (int64_t d = 0; d < a.dims; ++d) rows *= a.sizes[d];
  return rows;
}

static inline int64_t visible_columns(const SoftmaxArguments& a, int64_t query) {
  if (a.causal_offset == kNotCausal) return a.columns;
  return larger(0, smaller(a.columns, query + a.causal_offset + 1));
}

template <class F>
PYCKPT_HD F infinity() {
  return F(__builtin_huge_val());
}

// scores[i] = scale x[i] + mask[i], or -inf where masked: what lies behind a mask, even NaN, is not looked at. Returns the
// maximum (NaN if any score is) and, in `kept`, whether the mask keeps anything.
template <class T, class F>
static inline F row_scores(const SoftmaxArguments& a, const T* x, int64_t mask_offset, int64_t visible, F* scores, bool* kept) {
  const F scale = F(a.scale), lowest = -infinity<F>();
  const int64_t step = a.mask.column_stride;
  F top = lowest;
  int count = 0;
  if (a.mask.kind == 1) {
    const uint8_t* keep = static_cast<const uint8_t*>(a.mask.data) + mask_offset;
#pragma omp simd reduction(| : count)
    for (int64_t i = 0; i < visible; ++i) {
      count |= keep[i * step];
      scores[i] = keep[i * step] ? F(load(x + i)) * scale : lowest;
    }
  } else if (a.mask.kind == 2) {
    const T* add = static_cast<const T*>(a.mask.data) + mask_offset;
#pragma omp simd reduction(| : count)
    for (int64_t i = 0; i < visible; ++i) {
      const F m = load(add + i * step);
      count |= m != lowest;
      scores[i] = m == lowest ? lowest : F(load(x + i)) * scale + m;
    }
  } else {
    count = visible > 0;
#pragma omp simd
    for (int64_t i = 0; i < visible; ++i) scores[i] = F(load(x + i)) * scale;
  }
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < visible; ++i) top = top < scores[i] ? scores[i] : top;
  *kept = count != 0;
  return top;
}

// p = exp(score - maximum) / sum.
template <class F>
PYCKPT_HD F probability(F score, F top, F inverse_sum) {
  return exponential(score - top) * inverse_sum;
}

// Calls body(start, count, factors) over [0, n) of a row whose first element has logical index `first`.
template <class F, class Body>
static inline void with_factors(const DropoutRule& rule, int64_t first, int64_t n, const Body& body) {
  F factors[kMaskBlock];
  const int64_t lead = first % 4;  // blocks of four do not end with the rows
  for (int64_t start = -lead; start < n; start += kMaskBlock) {
    dropout_factors(rule, first + start, factors);
    const int64_t from = larger(0, start);
    body(from, smaller(n, start + kMaskBlock) - from, factors + (from - start));
  }
}

template <class T>
static void forward_rows(const SoftmaxArguments& a, T* y, arithmetic<T>* statistics, bool recompute, int threads) {
  using F = arithmetic<T>;
  const int64_t rows = row_count(a), n = a.columns;
  F* maxima = statistics;
  F* inverses = statistics ? statistics + rows : nullptr;
  parallel_for(rows, 1, divide_up(kGrain, larger(1, n)), threads, [&](int64_t begin, int64_t end) {
    F* scores = static_cast<F*>(__builtin_malloc(size_t(larger(1, n)) * sizeof(F)));
    for (int64_t row = begin; row < end; ++row) {
      const RowCursor at = locate(a, nullptr, row);
      const int64_t visible = visible_columns(a, at.query);
      T* out = y + row * n;
      bool kept;
      F top = row_scores<T, F>(a, static_cast<const T*>(a.x) + at.x, at.mask, visible, scores, &kept);
      F inverse;
      if (recompute) {
        top = maxima[row];
        inverse = inverses[row];
#pragma omp simd
        for (int64_t i = 0; i < visible; ++i) scores[i] = exponential(scores[i] - top);
      } else {
        if (!kept) top = F(0);
        const F sum = sum_over<F>(visible, [=](int64_t i) { return scores[i] = exponential(scores[i] - top); });
        inverse = kept ? F(1) / sum : F(0);
        if (statistics) {
          maxima[row] = top;
          inverses[row] = inverse;
        }
      }
      if (a.dropout_p > 0) {
        with_factors<F>(DropoutRule(a.dropout_p, a.seed), row * n, visible, [&](int64_t start, int64_t count, const F* factors) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) store(out + start + i, scores[start + i] * inverse * factors[i]);
        });
      } else {
#pragma omp simd
        for (int64_t i = 0; i < visible; ++i) store(out + i, scores[i] * inverse);
      }
      for (int64_t i = visible; i < n; ++i) store(out + i, F(0));
    }
    __builtin_free(scores);
  });
}

// dx = grad_scale p (g - sum(g p)), g the gradient (times the dropout factor). Where something may be masked, a probability of
// zero hides its gradient, which may hold NaN from a masked value.
template <bool kMasked, class F>
PYCKPT_HD F weighted(F p, F g) {
  return kMasked && p == F(0) ? F(0) : p * g;
}

template <bool kMasked, class T, class F = arithmetic<T>>
static void backward_rows(const SoftmaxArguments& a, const T* grad, const int64_t* grad_strides, const T* y,
                          const arithmetic<T>* statistics, T* dx, F scale, int threads) {
  const int64_t rows = row_count(a), n = a.columns;
  parallel_for(rows, 1, divide_up(kGrain, larger(1, n)), threads, [&](int64_t begin, int64_t end) {
    F* scratch = y ? nullptr : static_cast<F*>(__builtin_malloc(size_t(larger(1, 2 * n)) * sizeof(F)));
    for (int64_t row = begin; row < end; ++row) {
      const RowCursor at = locate(a, grad_strides, row);
      const int64_t visible = visible_columns(a, at.query);
      const T* g_row = grad + at.other;
      T* out = dx + row * n;
      if (y) {
        const T* p_row = y + row * n;
        const F dot = sum_over<F>(visible, [=](int64_t i) { return weighted<kMasked>(F(load(p_row + i)), F(load(g_row + i))); });
#pragma omp simd
        for (int64_t i = 0; i < visible; ++i)
          store(out + i, weighted<kMasked>(F(load(p_row + i)), F(load(g_row + i)) - dot) * scale);
      } else {
        F *p = scratch, *g = scratch + n;
        bool kept;
        row_scores<T, F>(a, static_cast<const T*>(a.x) + at.x, at.mask, visible, p, &kept);
        const F top = statistics[row], inverse = statistics[rows + row];
        with_factors<F>(DropoutRule(a.dropout_p, a.seed), row * n, visible, [&](int64_t start, int64_t count, const F* factors) {
#pragma omp simd
          for (int64_t i = start; i < start + count; ++i) {
            p[i] = probability(p[i], top, inverse);
            g[i] = F(load(g_row + i)) * factors[i - start];
          }
        });
        const F dot = sum_over<F>(visible, [=](int64_t i) { return weighted<kMasked>(p[i], g[i]); });
#pragma omp simd
        for (int64_t i = 0; i < visible; ++i) store(out + i, weighted<kMasked>(p[i], g[i] - dot) * scale);
      }
      for (int64_t i = visible; i < n; ++i) store(out + i, F(0));
    }
    __builtin_free(scratch);
  });
}

void softmax_forward(const SoftmaxArguments& a, void* y, void* statistics, bool recompute, int threads) {
  with_dtype(a.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    forward_rows<T>(a, static_cast<T*>(y), static_cast<arithmetic<T>*>(statistics), recompute, threads);
  });
}

void softmax_backward(const SoftmaxArguments& a, const void* grad, const int64_t* grad_strides, const void* y,
                      const void* statistics, void* dx, double grad_scale, bool masked, int threads) {
  with_dtype(a.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = masked ? backward_rows<true, T> : backward_rows<false, T>;
    run(a, static_cast<const T*>(grad), grad_strides, static_cast<const T*>(y), static_cast<const arithmetic<T>*>(statistics),
        static_cast<T*>(dx), arithmetic<T>(grad_scale), threads);
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
