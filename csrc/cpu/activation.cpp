// GELU, SiLU, ReLU. Forward (which is also the recompute) reads x and writes y; backward reads grad and x and writes dx:
// 2 and 3 elements moved per element, the arithmetic of math.h in between.
#include "elementwise.h"
#include "launchers.h"

namespace pyckpt {
namespace PYCKPT_ISA {

struct Relu {  // keeps NaN; backward may be given the output in place of x, their signs agree
  template <class F>
  PYCKPT_HD F forward(F x) {
    return x < F(0) ? F(0) : x;
  }
};

template <class Body>
static void with_activation(int op, Body&& body) {
  switch (op) {
    case kGeluErf: return body(GeluErf{});
    case kGeluTanh: return body(GeluTanh{});
    case kSilu: return body(Silu{});
    default: return body(Relu{});
  }
}

template <class Op, class F>
PYCKPT_HD F chain(Op, F grad, F x) {
  return grad * Op::derivative(x);
}
template <class F>
PYCKPT_HD F chain(Relu, F grad, F x) {
  return x <= F(0) ? F(0) : grad;
}

void activation_forward(int op, int dtype, const void* x, void* y, int64_t n, const StridedView* view, int threads) {
  with_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_activation(op, [&](auto act) {
      using Op = decltype(act);
      map_unary(view, n, static_cast<const T*>(x), static_cast<T*>(y), threads, [](int64_t, int64_t count, const T* in, T* out) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) store(out + i, Op::forward(load(in + i)));
      });
    });
  });
}

void activation_backward(int op, int dtype, const void* grad, const void* x, void* dx, int64_t n, const StridedView* view,
                         int threads) {
  with_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_activation(op, [&](auto act) {
      map_binary(view, n, static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<T*>(dx), threads,
                 [act](int64_t, int64_t count, const T* g, const T* in, T* out) {
#pragma omp simd
                   for (int64_t i = 0; i < count; ++i) store(out + i, chain(act, load(g + i), load(in + i)));
                 });
    });
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
