#include "launchers.h"

namespace pyckpt {
namespace PYCKPT_ISA {

extern const Kernels kernels = {
    activation_forward, activation_backward, dropout,           norm_forward,       norm_backward,
    softmax_forward,    softmax_backward,    attention_forward, attention_backward,
};

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
