#include "bindings.h"

#include "../bindings.h"
#include "kernels.h"

namespace pyckpt {
namespace {

struct Cuda {
  using Where = cuda::Where;

  static constexpr auto activation_forward = cuda::activation_forward;
  static constexpr auto activation_backward = cuda::activation_backward;
  static constexpr auto dropout = cuda::dropout;
  static constexpr auto norm_forward = cuda::norm_forward;
  static constexpr auto norm_backward = cuda::norm_backward;
  static constexpr auto softmax_forward = cuda::softmax_forward;
  static constexpr auto softmax_backward = cuda::softmax_backward;
};

}  // namespace

void bind_cuda(pybind11::module_& module) { Bindings<Cuda>::define(module); }

}  // namespace pyckpt
