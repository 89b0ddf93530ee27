// GELU, SiLU, ReLU. Forward (which is also the recompute) reads x and writes y; backward reads grad and x and writes dx:
// 2 and 3 elements moved per element, the arithmetic of math.h in between.
#include "elementwise.h"
#include "launchers.h"

namespace pyckpt {
namespace PYCKPT_ISA {

template <class Body>
static void with_activation(int op, const Body& body) {
  switch (op) {
    case kGeluErf: return body(GeluErf{});
    case kGeluTanh: return body(GeluTanh{});
    case kSilu: return body(Silu{});
    default: return body(Relu{});
  }
}

void activation_forward(int op, int dtype, const void* x, void* y, int64_t n, const StridedView* view, int threads) {
  with_arithmetic(dtype, [&](auto type) {
    using F = typename decltype(type)::type;
    with_activation(op, [&](auto activation) {
      using Op = decltype(activation);
      map_elements<F, 1>(dtype, view, n, {x}, y, threads, [](int64_t, int64_t count, const F* const* in, F* out) {
        const F* values = in[0];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = Op::forward(values[i]);
      });
    });
  });
}

void activation_backward(int op, int dtype, const void* grad, const void* x, void* dx, int64_t n, const StridedView* view,
                         int threads) {
  with_arithmetic(dtype, [&](auto type) {
    using F = typename decltype(type)::type;
    with_activation(op, [&](auto activation) {
      using Op = decltype(activation);
      map_elements<F, 2>(dtype, view, n, {grad, x}, dx, threads, [](int64_t, int64_t count, const F* const* in, F* out) {
        const F *g = in[0], *values = in[1];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = Op::backward(g[i], values[i]);
      });
    });
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
