// Dropout: y = x factor, factor = 1 / (1 - p) or 0 by Philox. Forward, recompute and backward are this one kernel, applied to
// x or to the gradient: 2 elements moved per element, and no mask. A dropped NaN or infinity gives NaN, as in torch.
#include "elementwise.h"
#include "launchers.h"
#include "probability.h"

namespace pyckpt {
namespace PYCKPT_ISA {

void dropout(int dtype, const void* x, void* y, int64_t n, const StridedView* view, double p, const int64_t* seed, int threads) {
  const DropoutRule rule = dropout_rule(p, uint64_t(*seed));
  with_arithmetic(dtype, [&](auto type) {
    using F = typename decltype(type)::type;
    map_elements<F, 1>(dtype, view, n, {x}, y, threads, [&](int64_t begin, int64_t count, const F* const* in, F* out) {
      const F* values = in[0];
      with_factors<F>(rule, begin, count, [&](int64_t start, int64_t size, const F* factors) {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[start + i] = values[start + i] * factors[i];
      });
    });
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
