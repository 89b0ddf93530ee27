// From Python's arguments to those of the launchers, the same for every device. Pointers arrive as integers
// (Tensor.data_ptr()); shapes, dtypes and devices have been checked by the caller (pyckpt/ops).
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <vector>

#include "arguments.h"

namespace pyckpt {

using Address = std::uintptr_t;
using Integers = std::vector<int64_t>;
using View = std::array<int64_t, 3>;  // inner, outer stride, inner stride

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// `view` is empty for operands that are dense in one common order, else sizes followed by each operand's strides.
class Operands {
 public:
  Operands(const Integers& view, size_t operands)
      : dims_(int64_t(view.size() / (operands + 1))), view_{dims_, view.data(), view.data() + dims_} {}
  const StridedView* get() const { return dims_ ? &view_ : nullptr; }

 private:
  int64_t dims_;
  StridedView view_;
};

// rows: for each leading dimension its size, then x's strides, then the mask's, then grad's (as far as given).
inline SoftmaxArguments softmax_arguments(int dtype, Address x, const Integers& rows, int64_t dims, int64_t columns, double scale,
                                          int mask_kind, Address mask, int64_t mask_step, int64_t causal_offset, bool causal,
                                          double dropout_p, Address seed) {
  const int64_t* sizes = rows.data();
  return {dtype,
          pointer(x),
          sizes + dims,
          dims,
          sizes,
          columns,
          scale,
          {mask_kind, pointer(mask), sizes + 2 * dims, mask_step},
          causal ? causal_offset : kNotCausal,
          dropout_p,
          pointer<int64_t>(seed)};
}

// One thin function for each launcher. Device::Where is what Python passes last: threads, or device and stream; Device's static
// functions take it last too.
template <class Device>
struct Bindings {
  using Where = typename Device::Where;

  static void activation_forward(int op, int dtype, Address x, Address y, int64_t n, const Integers& view, Where where) {
    Device::activation_forward(op, dtype, pointer(x), pointer(y), n, Operands(view, 2).get(), where);
  }
  static void activation_backward(int op, int dtype, Address grad, Address x, Address dx, int64_t n, const Integers& view,
                                  Where where) {
    Device::activation_backward(op, dtype, pointer(grad), pointer(x), pointer(dx), n, Operands(view, 3).get(), where);
  }
  static void dropout(int dtype, Address x, Address y, int64_t n, const Integers& view, double p, Address seed, Where where) {
    Device::dropout(dtype, pointer(x), pointer(y), n, Operands(view, 2).get(), p, pointer<int64_t>(seed), where);
  }

  static void norm_forward(int kind, int dtype, int parameter_dtype, int64_t rows, int64_t columns, double eps, Address x,
                           View x_view, Address weight, Address bias, Address y, Address statistics, bool recompute,
                           Where where) {
    const NormArguments arguments{kind, dtype,      parameter_dtype, rows,          columns,
                                  eps,  pointer(x), pointer(weight), pointer(bias), {x_view[0], x_view[1], x_view[2]}};
    Device::norm_forward(arguments, pointer(y), pointer(statistics), recompute, where);
  }
  static void norm_backward(int kind, int dtype, int parameter_dtype, int64_t rows, int64_t columns, double eps, Address x,
                            View x_view, Address weight, Address grad, View grad_view, Address statistics, Address dx,
                            Address dweight, Address dbias, Address partial, int64_t blocks, Where where) {
    const NormArguments arguments{kind, dtype,      parameter_dtype, rows,    columns,
                                  eps,  pointer(x), pointer(weight), nullptr, {x_view[0], x_view[1], x_view[2]}};
    const NormGradients gradients{pointer(grad),
                                  pointer(statistics),
                                  {grad_view[0], grad_view[1], grad_view[2]},
                                  pointer(dx),
                                  pointer(dweight),
                                  pointer(dbias),
                                  pointer(partial),
                                  blocks};
    Device::norm_backward(arguments, gradients, where);
  }

  static void softmax_forward(int dtype, Address x, const Integers& rows, int64_t dims, int64_t columns, double scale,
                              int mask_kind, Address mask, int64_t mask_step, int64_t causal_offset, bool causal,
                              double dropout_p, Address seed, Address y, Address statistics, bool recompute, Where where) {
    Device::softmax_forward(softmax_arguments(dtype, x, rows, dims, columns, scale, mask_kind, mask, mask_step, causal_offset,
                                              causal, dropout_p, seed),
                            pointer(y), pointer(statistics), recompute, where);
  }
  static void softmax_backward(int dtype, Address x, const Integers& rows, int64_t dims, int64_t columns, double scale,
                               int mask_kind, Address mask, int64_t mask_step, int64_t causal_offset, bool causal,
                               double dropout_p, Address seed, Address grad, Address y, Address statistics, Address dx,
                               double grad_scale, bool masked, Where where) {
    const SoftmaxGradients gradients{
        pointer(grad), rows.data() + 3 * dims, pointer(y), pointer(statistics), pointer(dx), grad_scale, masked};
    Device::softmax_backward(softmax_arguments(dtype, x, rows, dims, columns, scale, mask_kind, mask, mask_step, causal_offset,
                                               causal, dropout_p, seed),
                             gradients, where);
  }

  static void define(pybind11::module_& m) {
    using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
    m.def("activation_forward", &activation_forward, Release());
    m.def("activation_backward", &activation_backward, Release());
    m.def("dropout", &dropout, Release());
    m.def("norm_forward", &norm_forward, Release());
    m.def("norm_backward", &norm_backward, Release());
    m.def("softmax_forward", &softmax_forward, Release());
    m.def("softmax_backward", &softmax_backward, Release());
  }
};

}  // namespace pyckpt
