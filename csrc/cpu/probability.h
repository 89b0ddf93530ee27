// What softmax and attention share: rows of probabilities and dropout along them.
#pragma once

#include "random.h"

namespace pyckpt {
namespace PYCKPT_ISA {

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

// e / sum for the elements of one row; a row in which nothing is kept has sum 0 and gives 0.
template <class F>
struct Quotient {
  F sum, inverse;
  explicit Quotient(F total) : sum(total), inverse(inverse_of(total)) {}
  F operator()(F e) const { return quotient(e, sum, inverse); }
};

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
