// The CUDA launchers as functions of a Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace pyckpt {

// As the CPU's, with (index of the device, stream) in the place of the number of threads.
void bind_cuda(pybind11::module_& module);

}  // namespace pyckpt
