// GELU, SiLU, ReLU. Forward (which is also the recompute) reads x and writes y; backward reads grad and x and writes dx:
// 2 and 3 elements moved per element, the arithmetic of math.h in between.
#include "elementwise.cuh"

namespace pyckpt {
namespace cuda {

template <class Formula>
struct Forward {
  PYCKPT_MEMBER void prepare() {}
  template <class F, int kElements>
  PYCKPT_MEMBER void operator()(int64_t, const F (&in)[1][kElements], F (&out)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) out[i] = Formula::forward(in[0][i]);
  }
};

template <class Formula>
struct Backward {
  PYCKPT_MEMBER void prepare() {}
  template <class F, int kElements>
  PYCKPT_MEMBER void operator()(int64_t, const F (&in)[2][kElements], F (&out)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) out[i] = Formula::backward(in[0][i], in[1][i]);
  }
};

template <class Body>
static void with_activation(int op, const Body& body) {
  switch (op) {
    case kGeluErf: return body(GeluErf{});
    case kGeluTanh: return body(GeluTanh{});
    case kGeluSigmoid: return body(GeluSigmoid{});
    case kSilu: return body(Silu{});
    default: return body(Relu{});
  }
}

void activation_forward(int op, int dtype, const void* x, void* y, int64_t n, const StridedView* view, Where where) {
  with_activation(op, [&](auto formula) { map_elements<1>(dtype, x, nullptr, y, n, view, Forward<decltype(formula)>{}, where); });
}

void activation_backward(int op, int dtype, const void* grad, const void* x, void* dx, int64_t n, const StridedView* view,
                         Where where) {
  with_activation(op, [&](auto formula) { map_elements<2>(dtype, grad, x, dx, n, view, Backward<decltype(formula)>{}, where); });
}

}  // namespace cuda
}  // namespace pyckpt
