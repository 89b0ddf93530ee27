// What attention does between its matrix products, in one pass over a block of scores, in place.
//
// Forward reads the scores q k^T and writes probabilities (2 elements moved per element, one exponential); backward reads the
// scores and dP = dO v^T and writes probabilities and dS (4 elements moved, one exponential). Of a row, the first-level cache
// holds what memory holds and one row of float, in which exponentials become probabilities: scores and dP are widened, and
// results rounded, where they are read and written. Everything that makes a row is in it, so that the sum of dP P is taken here,
// from what it will be subtracted from, and not from the rounded output.
#include "launchers.h"
#include "probability.h"
#include "rows.h"

namespace pyckpt {
namespace PYCKPT_ISA {

// Where row i of a block stands, and which of its columns it sees.
struct BlockRow {
  int64_t head, batch, head_in_batch, query, begin, end;
};
static inline BlockRow block_row(const AttentionBlock& a, int64_t i) {
  BlockRow r;
  r.head = a.first_head + i / a.rows;
  r.batch = r.head / a.heads_per_batch;
  r.head_in_batch = r.head % a.heads_per_batch;
  r.query = a.first_row + i % a.rows;
  // low and high leave room: they are limited to what the sizes need (_attention_blocks.py)
  r.begin = smaller(a.columns, larger(0, r.query + a.low - a.first_key));
  r.end = larger(r.begin, smaller(a.columns, r.query + a.high + 1 - a.first_key));
  return r;
}

template <class Reader>
class RowOfScores {
  using F = typename Reader::Value;

 public:
  RowOfScores(const AttentionBlock& block, int64_t columns) : a_(block), scratch_(4 * columns), n_(columns) {}

  // Calls body(score, kept): score(i) for the columns that row `r` sees, -inf where masked, of which any is kept; what lies
  // behind a mask, even NaN, is not looked at. body may write to exponentials() as it goes from i to i.
  template <class Body>
  void form(const BlockRow& r, const void* scores, int64_t row, const Body& body) {
    const int64_t n = r.end - r.begin;
    const Reader x(a_.dtype, scores, row * a_.columns + r.begin, n, scratch_.at(2 * n_));
    const F scale = F(a_.scale);
    if (a_.softcap == 0 && !a_.slopes) return masked(r, n, [=](int64_t i) { return x(i) * scale; }, body);
    composed(r, x, n);
    const F* s = scratch_.at(0);
    masked(r, n, [=](int64_t i) { return s[i]; }, body);
  }
  F* exponentials() const { return scratch_.at(0); }
  const F* capped() const { return scratch_.at(n_); }  // tanh(score / softcap), where there is one

 private:
  // Of softcap and slopes.
  void composed(const BlockRow& r, const Reader& x, int64_t n) {
    F* s = scratch_.at(0);
    F* t = scratch_.at(n_);
    const F scale = F(a_.scale);
    if (a_.softcap != 0) {
      const F cap = F(a_.softcap);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        t[i] = hyperbolic_tangent(x(i) * scale / cap);
        s[i] = t[i] * cap;
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) s[i] = x(i) * scale;
    }
    if (a_.slopes) {
      const F slope = static_cast<const F*>(a_.slopes)[r.batch * a_.slope_strides[0] + r.head_in_batch * a_.slope_strides[1]];
      const F start = F(a_.first_key + r.begin - r.query - a_.origin);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) s[i] -= slope * absolute(start + F(i));
    }
  }

  template <class Score, class Body>
  void masked(const BlockRow& r, int64_t n, const Score& score, const Body& body) {
    if (a_.mask_kind == kNoMask) return body(score, n > 0);
    const int64_t *by = a_.mask_strides, step = by[3];
    const int64_t offset = r.batch * by[0] + r.head_in_batch * by[1] + r.query * by[2] + (a_.first_key + r.begin) * step;
    F *s = scratch_.at(0), *staged = scratch_.at(3 * n_);
    bool kept;
    if (a_.mask_kind == kBooleanMask) {
      const uint8_t* keep = static_cast<const uint8_t*>(a_.mask) + offset;
      kept = step == 1 ? choose(n, score, keep, 1, s) : choose(n, score, keep, step, s);
    } else if (step != 1) {
      for (int64_t i = 0; i < n; ++i) staged[i] = *widen(a_.mask_dtype, a_.mask, offset + i * step, 1, staged + i);
      kept = add(n, score, Plain<F>(staged), s);
    } else if (sizeof(F) == 4 && a_.mask_dtype == kBFloat16) {
      kept = add(n, score, Bfloat16s(a_.mask_dtype, a_.mask, offset, n, nullptr), s);
    } else {
      kept = add(n, score, Plain<F>(a_.mask_dtype, a_.mask, offset, n, staged), s);
    }
    body([=](int64_t i) { return s[i]; }, kept);
  }

  // s = the scores, -inf where masked. Whether any is kept.
  template <class Score>
  static inline __attribute__((always_inline)) bool choose(int64_t n, const Score score, const uint8_t* keep, int64_t step,
                                                           F* s) {
    int kept = 0;
#pragma omp simd reduction(| : kept)
    for (int64_t i = 0; i < n; ++i) {
      const int k = keep[i * step];
      const F x = score(i);
      kept |= k;
      s[i] = k ? x : -infinity<F>();
    }
    return kept != 0;
  }
  template <class Score, class Mask>
  static inline bool add(int64_t n, const Score score, const Mask mask, F* s) {
    const F lowest = -infinity<F>();
    int kept = 0;
#pragma omp simd reduction(| : kept)
    for (int64_t i = 0; i < n; ++i) {
      const F m = mask(i), sum = score(i) + m;
      kept |= m != lowest;
      s[i] = m == lowest ? lowest : sum;
    }
    return kept != 0;
  }

  const AttentionBlock& a_;
  const Scratch<F> scratch_;
  const int64_t n_;
};

// What no query of the row sees.
static inline void clear_outside(int dtype, void* base, int64_t row, const BlockRow& r, int64_t columns) {
  clear(dtype, base, row * columns, r.begin);
  clear(dtype, base, row * columns + r.end, columns - r.end);
}

template <class Reader>
static void forward_block(const AttentionBlock& a, void* scores, typename Reader::Value* logsumexp, int threads) {
  using F = typename Reader::Value;
  const int64_t n = a.columns;
  parallel_rows(a.heads * a.rows, n, threads, [&](int64_t first, int64_t last) {
    RowOfScores<Reader> row_of(a, n);
    const DropoutRule rule = a.seed ? dropout_rule(a.dropout_p, uint64_t(*a.seed)) : DropoutRule{};
    for (int64_t row = first; row < last; ++row) {
      const BlockRow r = block_row(a, row);
      const int64_t seen = r.end - r.begin, place = row * n + r.begin;
      const Ahead ahead[] = {{a.dtype, scores, smaller(row + 1, last - 1) * n}};
      row_of.form(r, scores, row, [&](const auto& score, bool kept) {
        F* e = row_of.exponentials();
        const F top = kept ? maximum_over<F>(seen, score) : F(0);
        const F sum = sum_over<F>(seen, [=](int64_t i) { return e[i] = exp_nonpositive(score(i) - top); }, ahead);
        logsumexp[r.head * a.queries + r.query] = kept ? top + F(__builtin_log(double(sum))) : -infinity<F>();
        const Quotient<F> quotient(sum);
        if (a.seed) {
          const int64_t index = (r.head * a.queries + r.query) * a.keys + a.first_key + r.begin;
          with_factors<F>(rule, index, seen, [&](int64_t start, int64_t count, const F* factors) {
            write<F>(a.dtype, scores, place + start, count, [=](int64_t, int64_t, F* p) {
#pragma omp simd
              for (int64_t i = 0; i < count; ++i) p[i] = quotient(e[start + i]) * factors[i];
            });
          });
        } else {
          write<F>(a.dtype, scores, place, seen, [=](int64_t start, int64_t count, F* p) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) p[i] = quotient(e[start + i]);
          });
        }
      });
      clear_outside(a.dtype, scores, row, r, n);
    }
  });
}

// The rows of a block in families: those that add to one row of the mask's gradient, along whose batch, head or query the mask is
// broadcast. A thread takes whole families, and all take their members in the same order.
class Families {
 public:
  explicit Families(const AttentionBlock& a) {
    const int64_t entries = larger(1, a.heads / a.heads_per_batch);  // a block has whole ones, or a part of one
    const int64_t sizes[] = {entries, a.heads / entries, a.rows};
    const int64_t steps[] = {a.heads / entries * a.rows, a.rows, 1};
    int count = 0;
    for (int shared = 1; shared >= 0; --shared)  // a member's digits are the lower ones
      for (int d = 2; d >= 0; --d)
        if (bool(shared) == (a.dmask && a.dmask_strides[d] == 0)) {
          digits_[count++] = {sizes[d], steps[d]};
          (shared ? members : families) *= sizes[d];
        }
  }
  // The row that is number `index` in this order.
  int64_t operator[](int64_t index) const {
    int64_t row = 0;
    for (const Digit& digit : digits_) {
      row += index % digit.size * digit.step;
      index /= digit.size;
    }
    return row;
  }
  int64_t families = 1, members = 1;

 private:
  struct Digit {
    int64_t size, step;
  } digits_[3];
};

// The gradient of the mask, of one family after the other: several members are summed first, in double, which of doubles keeps
// what rounding loses (TwoSum: Knuth, The Art of Computer Programming, volume 2, section 4.2.2).
template <class F>
class MaskGradient {
 public:
  MaskGradient(const AttentionBlock& a, int64_t members)
      : a_(a), members_(members), along_keys_(a.dmask && a.dmask_strides[3] == 1), sums_(members > 1 ? 2 * a.columns : 0) {}

  // Of a row the gradients of the columns that it sees.
  void add(int64_t member, const BlockRow& r, const F* gradient) {
    const int64_t *by = a_.dmask_strides, n = along_keys_ ? r.end - r.begin : 1;
    F* whole = static_cast<F*>(a_.dmask) + r.batch * by[0] + r.head_in_batch * by[1] + r.query * by[2] + a_.first_key * by[3];
    double of_row = 0, lost_of_row = 0;
    if (!along_keys_)
      for (int64_t i = r.begin; i < r.end; ++i) add_term(gradient[i - r.begin], of_row, lost_of_row);
    const F sum = F(of_row + lost_of_row), *terms = along_keys_ ? gradient : &sum;
    const int64_t begin = along_keys_ ? r.begin : 0, all = along_keys_ ? a_.columns : 1;
    if (members_ == 1) {
      for (int64_t i = 0; i < n; ++i) whole[begin + i] += terms[i];
      return;
    }
    double *sums = sums_.at(0), *lost = sums_.at(a_.columns);
    if (member == 0)
      for (int64_t i = 0; i < all; ++i) sums[i] = lost[i] = 0;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) add_term(terms[i], sums[begin + i], lost[begin + i]);
    if (member == members_ - 1)
      for (int64_t i = 0; i < all; ++i) whole[i] += F(sums[i] + lost[i]);
  }

 private:
  static void add_term(F term, double& sum, double& lost) {
    const double before = sum;
    sum += double(term);
    if constexpr (sizeof(F) == sizeof(double)) {
      const double added = sum - before;
      lost += (before - (sum - added)) + (double(term) - added);
    }
  }

  const AttentionBlock& a_;
  const int64_t members_;
  const bool along_keys_;
  const Scratch<double> sums_;
};

// P from the scores as in forward, bit for bit; dS = P (dP - sum(P dP)), times the softcap's slope and the scale.
template <bool kMasked, class Reader>
static void backward_block(const AttentionBlock& a, void* scores, void* gradients, int threads) {
  using F = typename Reader::Value;
  const int64_t n = a.columns;
  const Families rows(a);
  parallel_rows(rows.families, rows.members * 2 * n, threads, [&](int64_t first, int64_t last) {
    RowOfScores<Reader> row_of(a, n);
    MaskGradient<F> dmask(a, rows.members);
    const Scratch<F> scratch(3 * n);
    const DropoutRule rule = a.seed ? dropout_rule(a.dropout_p, uint64_t(*a.seed)) : DropoutRule{};
    const F scale = F(a.scale);
    const bool capped = a.softcap != 0;
    first *= rows.members, last *= rows.members;
    for (int64_t index = first; index < last; ++index) {
      const int64_t row = rows[index], next = rows[smaller(index + 1, last - 1)];
      const BlockRow r = block_row(a, row);
      const int64_t seen = r.end - r.begin, place = row * n + r.begin;
      const Ahead ahead[] = {{a.dtype, scores, next * n}, {a.dtype, gradients, next * n}};
      F* p = row_of.exponentials();
      row_of.form(r, scores, row, [&](const auto& score, bool kept) {
        const F top = kept ? maximum_over<F>(seen, score) : F(0);
        const F sum = sum_over<F>(seen, [=](int64_t i) { return p[i] = exp_nonpositive(score(i) - top); }, ahead);
        const Quotient<F> quotient(sum);
#pragma omp simd
        for (int64_t i = 0; i < seen; ++i) p[i] = quotient(p[i]);
      });

      // The gradient dP of what was multiplied by v is g of P.
      const auto finish = [&](const auto& g) {
        const F dot =
            dot_over<F>(seen, [=](int64_t i) { return p[i]; }, [=](int64_t i) { return kMasked && p[i] == F(0) ? F(0) : g(i); });
        if (a.dmask) {
          F* of_mask = scratch.at(2 * n);
#pragma omp simd
          for (int64_t i = 0; i < seen; ++i) of_mask[i] = weighted(kMasked, p[i], g(i) - dot);
          dmask.add(index % rows.members, r, of_mask);
        }
        const F* t = row_of.capped();
        write<F>(a.dtype, gradients, place, seen, [=](int64_t start, int64_t count, F* ds) {
          if (capped) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
              const F slope = fused(-t[start + i], t[start + i], F(1));
              ds[i] = weighted(kMasked, p[start + i], (g(start + i) - dot) * slope) * scale;
            }
          } else {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) ds[i] = weighted(kMasked, p[start + i], g(start + i) - dot) * scale;
          }
        });
      };
      const Reader dp(a.dtype, gradients, place, seen, scratch.at(0));
      if (a.seed) {
        F* dropped = scratch.at(n);
        const int64_t element = (r.head * a.queries + r.query) * a.keys + a.first_key + r.begin;
        with_factors<F>(rule, element, seen, [&](int64_t start, int64_t count, const F* factors) {
          write<F>(a.dtype, scores, place + start, count, [=](int64_t, int64_t, F* out) {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
              dropped[start + i] = dp(start + i) * factors[i];
              out[i] = p[start + i] * factors[i];
            }
          });
        });
        finish([=](int64_t i) { return dropped[i]; });
      } else {
        store(a.dtype, p, scores, place, seen);
        finish(dp);
      }
      clear_outside(a.dtype, scores, row, r, n);
      clear_outside(a.dtype, gradients, row, r, n);
    }
  });
}

void attention_forward(const AttentionBlock& block, void* scores, void* logsumexp, int threads) {
  with_reader(block.dtype, [&](auto type) {
    using Reader = typename decltype(type)::type;
    forward_block<Reader>(block, scores, static_cast<typename Reader::Value*>(logsumexp), threads);
  });
}

void attention_backward(const AttentionBlock& block, void* scores, void* gradients, int threads) {
  with_reader(block.dtype, [&](auto type) {
    using Reader = typename decltype(type)::type;
    const auto run = block.mask_kind == kNoMask ? backward_block<false, Reader> : backward_block<true, Reader>;
    run(block, scores, gradients, threads);
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
