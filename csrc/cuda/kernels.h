// The CUDA launchers. They return at once, allocate nothing and do not wait, so that CUDA graphs can capture them; results do
// not depend on the size of the machine. They throw where CUDA refuses a launch.
#pragma once

#include <utility>

#include "../arguments.h"

namespace pyckpt {
namespace cuda {

using Where = std::pair<int, intptr_t>;  // index of the device, and one of its streams

void activation_forward(int op, int dtype, const void* x, void* y, int64_t n, const StridedView* view, Where where);
void activation_backward(int op, int dtype, const void* grad, const void* x, void* dx, int64_t n, const StridedView* view,
                         Where where);
// `seed` lies on the device.
void dropout(int dtype, const void* x, void* y, int64_t n, const StridedView* view, double p, const int64_t* seed, Where where);
void norm_forward(const NormArguments& arguments, void* y, void* statistics, bool recompute, Where where);
// `partial` holds sums in the arithmetic of the dtype: float, or double for double.
void norm_backward(const NormArguments& arguments, const NormGradients& gradients, Where where);
void softmax_forward(const SoftmaxArguments& arguments, void* y, void* statistics, bool recompute, Where where);
void softmax_backward(const SoftmaxArguments& arguments, const SoftmaxGradients& gradients, Where where);
// bfloat16 or float16, width 64 or 128: throws std::invalid_argument for others.
void attention_forward(const AttentionArguments& arguments, Where where);
void attention_backward(const AttentionArguments& arguments, const AttentionGradients& gradients, Where where);

}  // namespace cuda
}  // namespace pyckpt
