// Softmax over the last dimension of scale * x + mask, with causal limit and dropout.
//
// Without dropout, backward reads the output (which a following matrix product keeps anyway). With dropout it reads x and two
// numbers a row, the maximum and the sum: the probabilities, the mask and their product are never stored.
// Forward and recompute move 2 elements per element (+ the mask), backward 3; what lies beyond a causal limit is not read. Rows
// too long for registers are read once more for each pass, from the second-level cache as far as it holds them.
#include "common.cuh"

namespace pyckpt {
namespace cuda {

template <class T>
struct SoftmaxRows {  // SoftmaxArguments with types, by value
  using F = typename Element<T>::F;
  const T* x;
  int64_t rows, columns;
  F scale;
  const void* mask;
  int mask_kind;
  bool wide_mask;  // kVector adjacent elements of it can be read at once
  int64_t mask_step, causal_offset;
  DropoutRule rule;  // its key is at *seed, known on the device alone
  const int64_t* seed;
  int dims;
  int64_t sizes[kMaxDims], x_strides[kMaxDims], mask_strides[kMaxDims], grad_strides[kMaxDims];
};

struct RowCursor {  // where a row starts in x, in the mask and in grad, and how many of its columns can be seen
  int64_t x, mask, grad, visible;
};
template <class T>
PYCKPT_DEVICE RowCursor locate(const SoftmaxRows<T>& a, int64_t row) {
  RowCursor at{0, 0, 0, a.columns};
  for (int d = a.dims - 1; d >= 0; --d) {
    const Division part = d ? divide(row, a.sizes[d]) : Division{0, row};
    row = part.quotient;
    at.x += part.remainder * a.x_strides[d];
    at.mask += part.remainder * a.mask_strides[d];
    at.grad += part.remainder * a.grad_strides[d];
    if (d == a.dims - 1 && a.causal_offset != kNotCausal) {
      const int64_t seen = part.remainder + a.causal_offset + 1;
      at.visible = seen < 0 ? 0 : smaller(seen, a.columns);
    }
  }
  return at;
}

// Scores of this thread's elements of a chunk, -inf where masked or beyond what is visible; kept: whether the mask keeps any.
template <class L, bool kMasks>
PYCKPT_DEVICE void scores(const SoftmaxRows<typename L::T>& a, const RowCursor& at, const Row<L>& row, int slot, int64_t column,
                          int valid, typename L::F (&s)[L::kElements], int& kept) {
  using T = typename L::T;
  using F = typename L::F;
  constexpr int V = L::kElements;
  row.get(slot, column, valid, s);
  if (!kMasks || a.mask_kind == kNoMask) {
    kept = 1;
#pragma unroll
    for (int i = 0; i < V; ++i) s[i] *= a.scale;
  } else if (a.mask_kind == kBooleanMask) {
    const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + at.mask + column * a.mask_step;
    uint8_t keep[V] = {};
    if (a.wide_mask) {
      if constexpr (V == 8) {
        const uint2 words = *reinterpret_cast<const uint2*>(mask);
#pragma unroll
        for (int i = 0; i < V; ++i) keep[i] = uint8_t((i < 4 ? words.x : words.y) >> (i % 4 * 8));
      } else if constexpr (V == 4) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(mask);
#pragma unroll
        for (int i = 0; i < V; ++i) keep[i] = uint8_t(word >> (i * 8));
      }
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (column + i < at.visible) keep[i] = mask[i * a.mask_step];
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (column + i < at.visible) kept |= keep[i];
      s[i] = kept_score(s[i], a.scale, keep[i]);
    }
  } else {
    const T* mask = static_cast<const T*>(a.mask) + at.mask + column * a.mask_step;
    F bias[V];
    if (a.wide_mask) {
      widen<T>(load<true>(mask, V), bias);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) bias[i] = column + i < at.visible ? Element<T>::widen(mask[i * a.mask_step]) : F(0);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (column + i < at.visible) kept |= bias[i] != -infinity<F>();
      s[i] = biased_score(s[i], a.scale, bias[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (!(L::kWide && !kMasks) && column + i >= at.visible) s[i] = -infinity<F>();
}

struct Highest {  // and whether anything is kept. NaN is left out.
  template <class F>
  PYCKPT_MEMBER Both<F, int> operator()(const Both<F, int>& a, const Both<F, int>& b) const {
    return {b.first > a.first ? b.first : a.first, a.second | b.second};
  }
};

// p = exp(score - maximum) / sum: with maximum and sum at hand, the same bits in forward, recompute and backward. kPlain: without
// mask, causal limit and dropout, and the registers they take.
template <class L, bool kPlain>
__global__ void __launch_bounds__(kLargestTeam, 1)
    softmax_forward_kernel(const __grid_constant__ SoftmaxRows<typename L::T> a, typename L::T* y, typename L::F* statistics,
                           bool recompute) {
  using F = typename L::F;
  constexpr int V = L::kElements;
  DropoutRule rule = a.rule;
  const bool dropped = !kPlain && a.seed;
  if (dropped) rule.key = uint64_t(*a.seed);
  int phase = 0;
  L::each_row(a.rows, a.columns, [&](int64_t r, int64_t n) {
    RowCursor at = locate(a, r);
    at.visible = kPlain ? n : smaller(n, at.visible);
    const auto seen = [&](int64_t column) { return (L::kWide && kPlain) || column < at.visible; };
    const Row<L> row(a.x + at.x, at.visible);
    F staged[L::kSlots][V];
    Both<F, int> peak{-infinity<F>(), 0};
    F top, sum;
    if (L::kInRegisters || !recompute)
      L::each_chunk(at.visible, [&](int slot, int64_t column, int valid) {
        scores<L, !kPlain>(a, at, row, slot, column, valid, staged[slot], peak.second);
#pragma unroll
        for (int i = 0; i < V; ++i) peak.first = staged[slot][i] > peak.first ? staged[slot][i] : peak.first;
      });
    if (recompute) {
      top = statistics[r];
    } else {
      peak = reduce(peak, Highest{}, phase);
      top = peak.second ? peak.first : F(0);
    }
    const auto exponentials = [&](int slot, int64_t column, int valid, F(&e)[V]) {
      int kept = 0;
      if (!L::kInRegisters) scores<L, !kPlain>(a, at, row, slot, column, valid, staged[slot], kept);
#pragma unroll
      for (int i = 0; i < V; ++i) e[i] = exp_nonpositive(staged[slot][i] - top);
    };
    if (recompute) {
      sum = statistics[a.rows + r];
      if (L::kInRegisters)
        L::each_chunk(at.visible, [&](int slot, int64_t column, int valid) { exponentials(slot, column, valid, staged[slot]); });
    } else {
      Part<typename L::T> part;
      L::each_chunk(at.visible, [&](int slot, int64_t column, int valid) {
        F e[V];
        exponentials(slot, column, valid, e);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (seen(column + i)) part.add(e[i]);
          if (L::kInRegisters) staged[slot][i] = e[i];
        }
      });
      sum = F(rounded(reduce(part.value(), Add{}, phase)));
      if (threadIdx.x == 0 && n) {
        statistics[r] = top;
        statistics[a.rows + r] = sum;
      }
    }
    const F inverse = inverse_of(sum);
    L::each_chunk(n, [&](int slot, int64_t column, int valid) {
      F p[V], e[V];
      if (seen(column)) {
        if (L::kInRegisters) {
#pragma unroll
          for (int i = 0; i < V; ++i) e[i] = staged[slot][i];
        } else {
          exponentials(slot, column, valid, e);
        }
      }
#pragma unroll
      for (int i = 0; i < V; ++i) p[i] = seen(column + i) ? quotient(e[i], sum, inverse) : F(0);
      if (dropped) {
        F factors[V];
        dropout_factors<V, false>(rule, r * a.columns + column, factors);
#pragma unroll
        for (int i = 0; i < V; ++i) p[i] = seen(column + i) ? p[i] * factors[i] : F(0);
      }
      store<L::kWide>(y + r * a.columns + column, valid, p);
    });
  });
}

template <class T>
struct SoftmaxBackwardRows {
  using F = typename Element<T>::F;
  const T *grad, *y;
  const F* statistics;
  T* dx;
  F scale;
  bool masked;
};

// dx = scale p (g - sum(g p)), p the output, g its gradient.
template <class L>
__global__ void __launch_bounds__(kLargestTeam, 1)
    softmax_backward_kernel(const __grid_constant__ SoftmaxRows<typename L::T> a, const SoftmaxBackwardRows<typename L::T> b) {
  using F = typename L::F;
  constexpr int V = L::kElements;
  int phase = 0;
  L::each_row(a.rows, a.columns, [&](int64_t r, int64_t n) {
    const Row<L> row(b.y + r * a.columns, n), grad(b.grad + locate(a, r).grad, n);
    Part<typename L::T, true> part;
    L::each_chunk(n, [&](int slot, int64_t column, int valid) {
      F p[V], g[V];
      row.get(slot, column, valid, p);
      grad.get(slot, column, valid, g);
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i < valid) part.add(p[i], b.masked && p[i] == F(0) ? F(0) : g[i]);
    });
    const F dot = F(rounded(reduce(part.value(), Add{}, phase)));
    L::each_chunk(n, [&](int slot, int64_t column, int valid) {
      F p[V], g[V];
      row.get(slot, column, valid, p);
      grad.get(slot, column, valid, g);
#pragma unroll
      for (int i = 0; i < V; ++i) p[i] = weighted(b.masked, p[i], g[i] - dot) * b.scale;
      store<L::kWide>(b.dx + r * a.columns + column, valid, p);
    });
  });
}

// With dropout: p is formed again from x and the statistics, and g is the gradient times the dropout factor.
template <class L>
__global__ void __launch_bounds__(kLargestTeam, 1)
    softmax_dropout_backward_kernel(const __grid_constant__ SoftmaxRows<typename L::T> a,
                                    const SoftmaxBackwardRows<typename L::T> b) {
  using F = typename L::F;
  constexpr int V = L::kElements;
  DropoutRule rule = a.rule;
  rule.key = uint64_t(*a.seed);
  const F keep_scale = F(rule.keep_scale);
  int phase = 0;
  L::each_row(a.rows, a.columns, [&](int64_t r, int64_t n) {
    RowCursor at = locate(a, r);
    at.visible = smaller(n, at.visible);
    const Row<L> row(a.x + at.x, at.visible), grad(b.grad + at.grad, at.visible);
    const F top = b.statistics[r], sum = b.statistics[a.rows + r], inverse = inverse_of(sum);
    F staged[L::kSlots][V];
    unsigned drawn[L::kSlots];  // a bit for each element: whether dropout keeps it
    const auto form = [&](int slot, int64_t column, int valid) {
      int kept = 0;
      scores<L, true>(a, at, row, slot, column, valid, staged[slot], kept);
      F factors[V];
      dropout_factors<V, false>(rule, r * a.columns + column, factors);
      drawn[slot] = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        staged[slot][i] = quotient(exp_nonpositive(staged[slot][i] - top), sum, inverse);
        drawn[slot] |= unsigned(factors[i] != F(0)) << i;
      }
    };
    const auto gradient = [&](int slot, int64_t column, int valid, F(&g)[V]) {
      grad.get(slot, column, valid, g);
#pragma unroll
      for (int i = 0; i < V; ++i) g[i] *= drawn[slot] >> i & 1 ? keep_scale : F(0);
    };
    Part<typename L::T, true> part;
    L::each_chunk(at.visible, [&](int slot, int64_t column, int valid) {
      form(slot, column, valid);
      F g[V];
      gradient(slot, column, valid, g);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const F p = staged[slot][i];
        if (column + i < at.visible) part.add(p, b.masked && p == F(0) ? F(0) : g[i]);
      }
    });
    const F dot = F(rounded(reduce(part.value(), Add{}, phase)));
    L::each_chunk(n, [&](int slot, int64_t column, int valid) {
      F g[V], dx[V] = {};
      if (column < at.visible) {
        if (!L::kInRegisters) form(slot, column, valid);
        gradient(slot, column, valid, g);
#pragma unroll
        for (int i = 0; i < V; ++i)
          if (column + i < at.visible) dx[i] = weighted(b.masked, staged[slot][i], g[i] - dot) * b.scale;
      }
      store<L::kWide>(b.dx + r * a.columns + column, valid, dx);
    });
  });
}

template <class T>
static SoftmaxRows<T> typed(const SoftmaxArguments& a, const int64_t* grad_strides, bool wide_mask) {
  SoftmaxRows<T> r;
  r.x = static_cast<const T*>(a.x);
  r.columns = a.columns;
  r.scale = typename Element<T>::F(a.scale);
  r.mask = a.mask.data;
  r.mask_kind = a.mask.kind;
  r.wide_mask = wide_mask;
  r.mask_step = a.mask.column_stride;
  r.causal_offset = a.causal_offset;
  r.rule = dropout_rule(a.dropout_p, 0);
  r.seed = a.seed;
  r.dims = int(a.dims);
  r.rows = 1;
  for (int d = 0; d < r.dims; ++d) {
    r.rows *= a.sizes[d];
    r.sizes[d] = a.sizes[d];
    r.x_strides[d] = a.x_strides[d];
    r.mask_strides[d] = a.mask.kind ? a.mask.row_strides[d] : 0;
    r.grad_strides[d] = grad_strides ? grad_strides[d] : 0;
  }
  return r;
}

static bool multiples(const int64_t* strides, int64_t dims, int64_t vector) {
  for (int64_t d = 0; d < dims; ++d)
    if (strides[d] % vector) return false;
  return true;
}
// Whether a thread's elements of the mask are read at once, where those of x are.
static bool whole_mask(const SoftmaxArguments& a, int64_t vector) {
  const auto address = reinterpret_cast<uintptr_t>(a.mask.data);
  return a.mask.kind && a.mask.column_stride == 1 && multiples(a.mask.row_strides, a.dims, vector) &&
         address % (a.mask.kind == kBooleanMask ? vector : 16) == 0;
}

void softmax_forward(const SoftmaxArguments& a, void* y, void* statistics, bool recompute, Where where) {
  const int64_t vector = vector_size(a.dtype);
  const bool wide = a.columns % vector == 0 && multiples(a.x_strides, a.dims, vector) && aligned(a.x, y);
  with_type(a.dtype, wide, [&](auto type, auto kWide) {
    using T = typename decltype(type)::type;
    const SoftmaxRows<T> rows = typed<T>(a, nullptr, kWide.value && whole_mask(a, vector));
    with_layout<T, kWide.value, 4>(a.columns, [&](auto layout) {
      using L = decltype(layout);
      const bool plain = !a.mask.kind && a.causal_offset == kNotCausal && !a.seed;
      const auto kernel = plain ? softmax_forward_kernel<L, true> : softmax_forward_kernel<L, false>;
      simt::launch(kernel, L::grid(a.columns ? rows.rows : 0, a.columns), L::block(a.columns), 0,
                   simt::Stream{where.first, where.second}, rows, static_cast<T*>(y), static_cast<typename L::F*>(statistics),
                   recompute);
    });
  });
}

void softmax_backward(const SoftmaxArguments& a, const SoftmaxGradients& out, Where where) {
  const int64_t vector = vector_size(a.dtype);
  const bool wide = a.columns % vector == 0 && multiples(out.grad_strides, a.dims, vector) && aligned(out.grad, out.dx) &&
                    (out.y ? aligned(out.y) : multiples(a.x_strides, a.dims, vector) && aligned(a.x));
  with_type(a.dtype, wide, [&](auto type, auto kWide) {
    using T = typename decltype(type)::type;
    using F = typename Element<T>::F;
    const SoftmaxRows<T> rows = typed<T>(a, out.grad_strides, kWide.value && whole_mask(a, vector));
    const SoftmaxBackwardRows<T> b{static_cast<const T*>(out.grad),
                                   static_cast<const T*>(out.y),
                                   static_cast<const F*>(out.statistics),
                                   static_cast<T*>(out.dx),
                                   F(out.grad_scale),
                                   out.masked};
    with_layout<T, kWide.value, 4>(a.columns, [&](auto layout) {
      using L = decltype(layout);
      const auto kernel = out.y ? softmax_backward_kernel<L> : softmax_dropout_backward_kernel<L>;
      simt::launch(kernel, L::grid(a.columns ? rows.rows : 0, a.columns), L::block(a.columns), 0,
                   simt::Stream{where.first, where.second}, rows, b);
    });
  });
}

}  // namespace cuda
}  // namespace pyckpt
