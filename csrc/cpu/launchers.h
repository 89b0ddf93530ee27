// Declarations of one instruction set's launchers; kernels.h says what they take.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace pyckpt {
namespace PYCKPT_ISA {

std::remove_pointer_t<decltype(Kernels::activation_forward)> activation_forward;
std::remove_pointer_t<decltype(Kernels::activation_backward)> activation_backward;
std::remove_pointer_t<decltype(Kernels::dropout)> dropout;
std::remove_pointer_t<decltype(Kernels::norm_forward)> norm_forward;
std::remove_pointer_t<decltype(Kernels::norm_backward)> norm_backward;
std::remove_pointer_t<decltype(Kernels::softmax_forward)> softmax_forward;
std::remove_pointer_t<decltype(Kernels::softmax_backward)> softmax_backward;
std::remove_pointer_t<decltype(Kernels::attention_forward)> attention_forward;
std::remove_pointer_t<decltype(Kernels::attention_backward)> attention_backward;

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
