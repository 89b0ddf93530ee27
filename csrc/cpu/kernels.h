// The table of CPU launchers, one per instruction set. `threads` is the caller's torch.get_num_threads().
#pragma once

#include "../arguments.h"

namespace pyckpt {

struct Kernels {
  void (*activation_forward)(int op, int dtype, const void* x, void* y, int64_t n, const StridedView* view, int threads);
  void (*activation_backward)(int op, int dtype, const void* grad, const void* x, void* dx, int64_t n, const StridedView* view,
                              int threads);
  void (*dropout)(int dtype, const void* x, void* y, int64_t n, const StridedView* view, double p, const int64_t* seed,
                  int threads);
  void (*norm_forward)(const NormArguments& arguments, void* y, void* statistics, bool recompute, int threads);
  void (*norm_backward)(const NormArguments& arguments, const NormGradients& gradients, int threads);
  void (*softmax_forward)(const SoftmaxArguments& arguments, void* y, void* statistics, bool recompute, int threads);
  void (*softmax_backward)(const SoftmaxArguments& arguments, const SoftmaxGradients& gradients, int threads);
};

#if defined(PYCKPT_X86)
namespace v2 {
extern const Kernels kernels;
}
namespace v3 {
extern const Kernels kernels;
}
namespace v4 {
extern const Kernels kernels;
}
#else
namespace base {
extern const Kernels kernels;
}
#endif

}  // namespace pyckpt
