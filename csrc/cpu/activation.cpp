// GELU, SiLU, ReLU. Forward (which is also the recompute) reads x and writes y; backward reads grad and x and writes dx:
// 2 and 3 elements moved per element, the arithmetic of math.h in between.
#include "elementwise.h"
#include "launchers.h"

namespace pyckpt {
namespace PYCKPT_ISA {

// ReLU of 16-bit floating-point numbers by their bits, as `Relu` does it: comparisons of integers in place of conversions.
template <uint16_t kInfinity>
struct ReluBits {
  PYCKPT_HD uint16_t forward(uint16_t x) { return uint16_t(x - 0x8001u) < kInfinity ? 0 : x; }
  PYCKPT_HD uint16_t backward(uint16_t grad, uint16_t x) { return uint16_t(x - 0x8000u) <= kInfinity || x == 0 ? 0 : grad; }
};

// Calls body(Type<F>{}, formula) with the type that the arithmetic is in.
template <class Body>
static void with_activation(int op, int dtype, const Body& body) {
  if (op == kRelu && dtype == kBFloat16) return body(Type<uint16_t>{}, ReluBits<0x7f80>{});
  if (op == kRelu && dtype == kFloat16) return body(Type<uint16_t>{}, ReluBits<0x7c00>{});
  with_arithmetic(dtype, [&](auto type) {
    switch (op) {
      case kGeluErf: return body(type, GeluErf{});
      case kGeluTanh: return body(type, GeluTanh{});
      case kGeluSigmoid: return body(type, GeluSigmoid{});
      case kSilu: return body(type, Silu{});
      default: return body(type, Relu{});
    }
  });
}

void activation_forward(int op, int dtype, const void* x, void* y, int64_t n, const StridedView* view, int threads) {
  with_activation(op, dtype, [&](auto type, auto formula) {
    using F = typename decltype(type)::type;
    using Op = decltype(formula);
    map_elements<F, 1>(dtype, view, n, {x}, y, threads, [](int64_t, int64_t count, const F* const* in, F* out) {
      const F* values = in[0];
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = Op::forward(values[i]);
    });
  });
}

void activation_backward(int op, int dtype, const void* grad, const void* x, void* dx, int64_t n, const StridedView* view,
                         int threads) {
  with_activation(op, dtype, [&](auto type, auto formula) {
    using F = typename decltype(type)::type;
    using Op = decltype(formula);
    map_elements<F, 2>(dtype, view, n, {grad, x}, dx, threads, [](int64_t, int64_t count, const F* const* in, F* out) {
      const F *g = in[0], *values = in[1];
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = Op::backward(g[i], values[i]);
    });
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
