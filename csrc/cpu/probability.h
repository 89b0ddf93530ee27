// What softmax and attention share: rows of probabilities and dropout along them.
#pragma once

#include "random.h"

namespace pyckpt {
namespace PYCKPT_ISA {

template <class F>
PYCKPT_HD F infinity() {
  return F(__builtin_huge_val());
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

// e / sum by the reciprocal and one correction: a division's result at a multiplication's price. A row in which nothing is kept
// has sum 0 and gives 0.
template <class F>
struct Quotient {
  F sum, inverse;
  explicit Quotient(F total) : sum(total), inverse(total == F(0) ? F(0) : F(1) / total) {}
  F operator()(F e) const {
#if !defined(PYCKPT_FUSED)
    return sum == F(0) ? F(0) : e / sum;
#endif
    const F q = e * inverse;
    return fused(fused(-q, sum, e), inverse, q);
  }
};

// Where something may be masked, a probability of zero hides its gradient, which may hold NaN from a masked value.
template <bool kMasked, class F>
PYCKPT_HD F weighted(F p, F g) {
  return kMasked && p == F(0) ? F(0) : p * g;
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
