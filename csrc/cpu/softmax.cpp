// Softmax over the last dimension of scale * x + mask, with causal limit and dropout, in one pass over memory.
//
// Without dropout, backward reads the output (which a following matrix product keeps anyway). With dropout it reads x and two
// numbers a row, the maximum and the sum: the probabilities, the mask and their product are never stored.
// Forward moves 2 elements per element (+ the mask), backward 3.
#include "launchers.h"
#include "probability.h"
#include "rows.h"

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

// Calls body(score, kept): score(i) = scale x(i) + mask[i], or -inf where masked, of which any is kept. body may write to
// `scores`, a row, as it goes from i to i. `staged` has room for a row of the mask.
template <class Reader, class F, class Body>
static inline void with_scores(const SoftmaxArguments& a, const Reader& x, int64_t mask_offset, int64_t visible, F* staged,
                               F* scores, const Body& body) {
  const F scale = F(a.scale), lowest = -infinity<F>();
  if (a.mask.kind == kNoMask) return body([=](int64_t i) { return x(i) * scale; }, visible > 0);
  const int64_t step = a.mask.column_stride;
  int kept = 0;
  if (a.mask.kind == kBooleanMask) {
    const uint8_t* keep = static_cast<const uint8_t*>(a.mask.data) + mask_offset;
#pragma omp simd reduction(| : kept)
    for (int64_t i = 0; i < visible; ++i) {
      const int k = keep[i * step];
      kept |= k;
      scores[i] = kept_score(x(i), scale, k);
    }
  } else {
    const F* add = staged;
    if (step == 1)
      add = widen(a.dtype, a.mask.data, mask_offset, visible, staged);
    else
      for (int64_t i = 0; i < visible; ++i) staged[i] = *widen(a.dtype, a.mask.data, mask_offset + i * step, 1, staged + i);
#pragma omp simd reduction(| : kept)
    for (int64_t i = 0; i < visible; ++i) {
      const F m = add[i];
      kept |= m != lowest;
      scores[i] = biased_score(x(i), scale, m);
    }
  }
  body([=](int64_t i) { return scores[i]; }, kept != 0);
}

// p = exp(score - maximum) / sum: with maximum and sum at hand, the same bits in forward, recompute and backward.
template <class Reader>
static void forward_rows(const SoftmaxArguments& a, void* y, typename Reader::Value* statistics, bool recompute, int threads) {
  using F = typename Reader::Value;
  const int64_t rows = row_count(a), n = a.columns;
  parallel_rows(rows, n, threads, [&](int64_t begin, int64_t end) {
    const Scratch<F> scratch(3 * n);
    F* e = scratch.at(2 * n);
    const DropoutRule rule = a.seed ? dropout_rule(a.dropout_p, uint64_t(*a.seed)) : DropoutRule{};
    for (int64_t row = begin; row < end; ++row) {
      const RowCursor at = locate(a, nullptr, row);
      const int64_t visible = visible_columns(a, at.query);
      const Reader x(a.dtype, a.x, at.x, visible, scratch.at(0));
      with_scores(a, x, at.mask, visible, scratch.at(n), e, [&](const auto& score, bool kept) {
        if (recompute) {
          const F top = statistics[row];
#pragma omp simd
          for (int64_t i = 0; i < visible; ++i) e[i] = exp_nonpositive(score(i) - top);
          return;
        }
        const F top = kept ? maximum_over<F>(visible, score) : F(0);
        const Ahead ahead[] = {{a.dtype, a.x, locate(a, nullptr, smaller(row + 1, end - 1)).x}, {a.dtype, y, row * n}};
        const F sum = sum_over<F>(visible, [=](int64_t i) { return e[i] = exp_nonpositive(score(i) - top); }, ahead);
        statistics[row] = top;
        statistics[rows + row] = sum;
      });
      const Quotient<F> quotient(statistics[rows + row]);
      if (a.seed) {
        with_factors<F>(rule, row * n, visible, [&](int64_t start, int64_t count, const F* factors) {
          write<F>(a.dtype, y, row * n + start, count, [=](int64_t, int64_t, F* out) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) out[i] = quotient(e[start + i]) * factors[i];
          });
        });
      } else {
        write<F>(a.dtype, y, row * n, visible, [=](int64_t start, int64_t count, F* out) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[i] = quotient(e[start + i]);
        });
      }
      clear(a.dtype, y, row * n + visible, n - visible);
    }
  });
}

// dx = grad_scale p (g - sum(g p)), g the gradient (times the dropout factor), p saved (y) or formed again from x.
template <bool kMasked, class Reader>
static void backward_rows(const SoftmaxArguments& a, const SoftmaxGradients& out, int threads) {
  using F = typename Reader::Value;
  const int64_t rows = row_count(a), n = a.columns;
  const F* statistics = static_cast<const F*>(out.statistics);
  parallel_rows(rows, n, threads, [&](int64_t begin, int64_t end) {
    const Scratch<F> scratch(5 * n);
    const F scale = F(out.grad_scale);
    const DropoutRule rule = a.seed ? dropout_rule(a.dropout_p, uint64_t(*a.seed)) : DropoutRule{};
    for (int64_t row = begin; row < end; ++row) {
      const RowCursor at = locate(a, out.grad_strides, row);
      const int64_t visible = visible_columns(a, at.query);
      const auto finish = [&](const auto& p, const auto& g) {
        const Ahead ahead(a.dtype, out.dx, row * n);
        const F dot = dot_over<F>(
            visible, p, [=](int64_t i) { return kMasked && p(i) == F(0) ? F(0) : g(i); },
            [&](int64_t i) { ahead.fetch(i, kLanes); });
        write<F>(a.dtype, out.dx, row * n, visible, [=](int64_t start, int64_t count, F* dx) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) dx[i] = weighted(kMasked, p(start + i), g(start + i) - dot) * scale;
        });
      };
      const Reader g(a.dtype, out.grad, at.other, visible, scratch.at(0));
      if (out.y) {
        finish(Reader(a.dtype, out.y, row * n, visible, scratch.at(n)), g);
      } else {
        const Reader x(a.dtype, a.x, at.x, visible, scratch.at(n));
        F *p = scratch.at(2 * n), *dropped = scratch.at(3 * n);
        const F top = statistics[row];
        const Quotient<F> quotient(statistics[rows + row]);
        with_scores(a, x, at.mask, visible, scratch.at(4 * n), p, [&](const auto& score, bool) {
          with_factors<F>(rule, row * n, visible, [&](int64_t start, int64_t count, const F* factors) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
              p[start + i] = quotient(exp_nonpositive(score(start + i) - top));
              dropped[start + i] = g(start + i) * factors[i];
            }
          });
        });
        finish([=](int64_t i) { return p[i]; }, [=](int64_t i) { return dropped[i]; });
      }
      clear(a.dtype, out.dx, row * n + visible, n - visible);
    }
  });
}

void softmax_forward(const SoftmaxArguments& a, void* y, void* statistics, bool recompute, int threads) {
  with_reader(a.dtype, [&](auto type) {
    using Reader = typename decltype(type)::type;
    forward_rows<Reader>(a, y, static_cast<typename Reader::Value*>(statistics), recompute, threads);
  });
}

void softmax_backward(const SoftmaxArguments& a, const SoftmaxGradients& gradients, int threads) {
  with_reader(a.dtype, [&](auto type) {
    using Reader = typename decltype(type)::type;
    const auto run = gradients.masked ? backward_rows<true, Reader> : backward_rows<false, Reader>;
    run(a, gradients, threads);
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
