// Dropout: y = x factor, factor = 1 / (1 - p) or 0 by Philox. Forward, recompute and backward are this one kernel, applied to
// x or to the gradient: 2 elements moved per element, and no mask. A dropped NaN or infinity gives NaN, as in torch.
#include "elementwise.cuh"

namespace pyckpt {
namespace cuda {

struct Dropout {
  DropoutRule rule;  // its key is at *seed, known on the device alone
  const int64_t* seed;

  PYCKPT_MEMBER void prepare() { rule.key = uint64_t(*seed); }
  template <class F, int kElements>
  PYCKPT_MEMBER void operator()(int64_t first, const F (&in)[1][kElements], F (&out)[kElements]) const {
    F factors[kElements];
    dropout_factors<kElements, kElements % 4 == 0>(rule, first, factors);
#pragma unroll
    for (int i = 0; i < kElements; ++i) out[i] = in[0][i] * factors[i];
  }
};

void dropout(int dtype, const void* x, void* y, int64_t n, const StridedView* view, double p, const int64_t* seed, Where where) {
  map_elements<1>(dtype, x, nullptr, y, n, view, Dropout{dropout_rule(p, 0), seed}, where);
}

}  // namespace cuda
}  // namespace pyckpt
