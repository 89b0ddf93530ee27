// Softmax over the last dimension of scale * x + mask, with causal limit and dropout, in one pass over memory.
//
// Without dropout, backward reads the output (which a following matrix product keeps anyway). With dropout it reads x and two
// numbers a row, the maximum and the sum: the probabilities, the mask and their product are never stored.
// Forward moves 2 elements per element (+ the mask), backward 3. Rows are staged in float (float64: double): each thread has room
// for 4 of them in forward, 6 in backward.
#include "launchers.h"
#include "probability.h"

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

// scores[i] = scale x[i] + mask[i], or -inf where masked. Returns whether the mask keeps anything, and in `top` the maximum.
// `staged` has room for a row of the mask.
template <class F>
static inline bool row_scores(const SoftmaxArguments& a, const F* x, int64_t mask_offset, int64_t visible, F* staged, F* scores,
                              F* top) {
  const F scale = F(a.scale), lowest = -infinity<F>();
  const int64_t step = a.mask.column_stride;
  if (a.mask.kind == kNoMask) {
    *top = maximum_over<F>(visible, [=](int64_t i) { return scores[i] = x[i] * scale; });
    return visible > 0;
  }
  int kept = 0;
  if (a.mask.kind == kBooleanMask) {
    const uint8_t* keep = static_cast<const uint8_t*>(a.mask.data) + mask_offset;
#pragma omp simd reduction(| : kept)
    for (int64_t i = 0; i < visible; ++i) {
      const int k = keep[i * step];
      kept |= k;
      scores[i] = kept_score(x[i], scale, k);
    }
    *top = maximum_over<F>(visible, [=](int64_t i) { return scores[i]; });
    return kept != 0;
  }
  const F* add = staged;
  if (step == 1)
    add = widen(a.dtype, a.mask.data, mask_offset, visible, staged);
  else
    for (int64_t i = 0; i < visible; ++i) staged[i] = *widen(a.dtype, a.mask.data, mask_offset + i * step, 1, staged + i);
#pragma omp simd reduction(| : kept)
  for (int64_t i = 0; i < visible; ++i) {
    const F m = add[i];
    kept |= m != lowest;
    scores[i] = biased_score(x[i], scale, m);
  }
  *top = maximum_over<F>(visible, [=](int64_t i) { return scores[i]; });
  return kept != 0;
}

// p = exp(score - maximum) / sum: with maximum and sum at hand, the same bits in forward, recompute and backward.
template <class F>
static void forward_rows(const SoftmaxArguments& a, void* y, F* statistics, bool recompute, int threads) {
  const int64_t rows = row_count(a), n = a.columns;
  parallel_rows(rows, n, threads, [&](int64_t begin, int64_t end) {
    const Scratch<F> scratch(4 * n);
    F* scores = scratch.at(3 * n);
    const DropoutRule rule = a.seed ? dropout_rule(a.dropout_p, uint64_t(*a.seed)) : DropoutRule{};
    for (int64_t row = begin; row < end; ++row) {
      const RowCursor at = locate(a, nullptr, row);
      const int64_t visible = visible_columns(a, at.query);
      const F* x = widen(a.dtype, a.x, at.x, visible, scratch.at(0));
      F* out = target(a.dtype, y, row * n, scratch.at(n));
      F top, sum;
      const bool kept = row_scores(a, x, at.mask, visible, scratch.at(2 * n), scores, &top);
      if (recompute) {
        top = statistics[row];
        sum = statistics[rows + row];
#pragma omp simd
        for (int64_t i = 0; i < visible; ++i) scores[i] = exp_nonpositive(scores[i] - top);
      } else {
        top = kept ? top : F(0);
        const Ahead ahead[] = {{a.dtype, a.x, locate(a, nullptr, smaller(row + 1, end - 1)).x}, {a.dtype, y, row * n}};
        sum = sum_over<F>(visible, [=](int64_t i) { return scores[i] = exp_nonpositive(scores[i] - top); }, ahead);
        statistics[row] = top;
        statistics[rows + row] = sum;
      }
      const Quotient<F> quotient(sum);
      if (a.seed) {
        with_factors<F>(rule, row * n, visible, [&](int64_t start, int64_t count, const F* factors) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[start + i] = quotient(scores[start + i]) * factors[i];
        });
      } else {
#pragma omp simd
        for (int64_t i = 0; i < visible; ++i) out[i] = quotient(scores[i]);
      }
      for (int64_t i = visible; i < n; ++i) out[i] = F(0);
      narrow(a.dtype, out, y, row * n, n);
    }
  });
}

// dx = grad_scale p (g - sum(g p)), g the gradient (times the dropout factor), p saved (y) or formed again from x.
template <bool kMasked, class F>
static void backward_rows(const SoftmaxArguments& a, const SoftmaxGradients& out, int threads) {
  const int64_t rows = row_count(a), n = a.columns;
  const F* statistics = static_cast<const F*>(out.statistics);
  parallel_rows(rows, n, threads, [&](int64_t begin, int64_t end) {
    const Scratch<F> scratch(6 * n);
    const F scale = F(out.grad_scale);
    const DropoutRule rule = a.seed ? dropout_rule(a.dropout_p, uint64_t(*a.seed)) : DropoutRule{};
    for (int64_t row = begin; row < end; ++row) {
      const RowCursor at = locate(a, out.grad_strides, row);
      const int64_t visible = visible_columns(a, at.query);
      const F* g = widen(a.dtype, out.grad, at.other, visible, scratch.at(0));
      F* dx = target(a.dtype, out.dx, row * n, scratch.at(n));
      const F* p = nullptr;
      if (out.y) {
        p = widen(a.dtype, out.y, row * n, visible, scratch.at(2 * n));
      } else {
        const F* x = widen(a.dtype, a.x, at.x, visible, scratch.at(2 * n));
        F *again = scratch.at(3 * n), *dropped = scratch.at(4 * n);
        F top;
        row_scores(a, x, at.mask, visible, scratch.at(5 * n), again, &top);
        top = statistics[row];
        const Quotient<F> quotient(statistics[rows + row]);
        with_factors<F>(rule, row * n, visible, [&](int64_t start, int64_t count, const F* factors) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) {
            again[start + i] = quotient(exp_nonpositive(again[start + i] - top));
            dropped[start + i] = g[start + i] * factors[i];
          }
        });
        p = again;
        g = dropped;
      }
      const Ahead ahead(a.dtype, out.dx, row * n);
      const F dot = dot_over<F>(
          visible, [=](int64_t i) { return p[i]; }, [=](int64_t i) { return kMasked && p[i] == F(0) ? F(0) : g[i]; },
          [&](int64_t i) { ahead.fetch(i, kLanes); });
#pragma omp simd
      for (int64_t i = 0; i < visible; ++i) dx[i] = weighted(kMasked, p[i], g[i] - dot) * scale;
      for (int64_t i = visible; i < n; ++i) dx[i] = F(0);
      narrow(a.dtype, dx, out.dx, row * n, n);
    }
  });
}

void softmax_forward(const SoftmaxArguments& a, void* y, void* statistics, bool recompute, int threads) {
  with_arithmetic(a.dtype, [&](auto type) {
    using F = typename decltype(type)::type;
    forward_rows<F>(a, y, static_cast<F*>(statistics), recompute, threads);
  });
}

void softmax_backward(const SoftmaxArguments& a, const SoftmaxGradients& gradients, int threads) {
  with_arithmetic(a.dtype, [&](auto type) {
    using F = typename decltype(type)::type;
    const auto run = gradients.masked ? backward_rows<true, F> : backward_rows<false, F>;
    run(a, gradients, threads);
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
