// Elementwise kernels over operands of one shape, any strides and any dtype.
#pragma once

#include "common.cuh"

namespace pyckpt {
namespace cuda {

constexpr int kThreads = 256;

// Where elements lie. The operands are the inputs, then the output. kVectors: as many vectors a thread takes, all loaded before
// any is worked on, since bytes in flight hide the latency of memory.
template <class T, int kOperands_>
struct DenseView {
  static constexpr int kOperands = kOperands_, kVectors = 2;
  PYCKPT_MEMBER void locate(int64_t vector, int64_t (&offsets)[kOperands]) const {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets[k] = vector * kVector<T>;
  }
};
// Sizes and strides by value; the innermost ones may count vectors.
template <int kOperands_>
struct StridesByValue {
  static constexpr int kOperands = kOperands_, kVectors = 1;
  int dims;
  int64_t sizes[kMaxDims], strides[kOperands][kMaxDims];

  // Offsets of what has the logical index `index`.
  PYCKPT_MEMBER void locate(int64_t index, int64_t (&offsets)[kOperands]) const {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets[k] = 0;
    for (int d = dims - 1; d > 0; --d) {
      const Division at = divide(index, sizes[d]);
      index = at.quotient;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offsets[k] += at.remainder * strides[k][d];
    }
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets[k] += index * strides[k][0];
  }
};

// y = op(inputs) for n logical elements, each of which is moved once. op(first, in, out) is given the logical index of the first
// of some elements, and their values.
//
// By vectors of adjacent elements. The last n % kVector elements, which only a dense view may have, are accessed one by one.
template <class T, class View, class Op>
__global__ void __launch_bounds__(kThreads)
    vector_kernel(const __grid_constant__ View view, Both<const T*, const T*> inputs, T* y, int64_t n, Op op) {
  constexpr int kVectors = View::kVectors, kInputs = View::kOperands - 1;
  using F = typename Element<T>::F;
  constexpr int kElements = kVector<T>;
  const T* in[2] = {inputs.first, inputs.second};
  const int64_t begin = int64_t(blockIdx.x) * (kThreads * kVectors) + threadIdx.x;
  op.prepare();
  uint4 raw[kVectors][kInputs];
  int64_t offsets[kVectors][kInputs + 1];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t vector = begin + v * kThreads, rest = n - vector * kElements;
    if (rest <= 0) continue;
    view.locate(vector, offsets[v]);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const T* from = in[k] + offsets[v][k];
      raw[v][k] = rest >= kElements ? load<true>(from, kElements) : load<false>(from, int(rest));
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t vector = begin + v * kThreads, rest = n - vector * kElements;
    if (rest <= 0) continue;
    F values[kInputs][kElements], out[kElements];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) widen<T>(raw[v][k], values[k]);
    op(vector * kElements, values, out);
    T* to = y + offsets[v][kInputs];
    rest >= kElements ? store<true>(to, kElements, out) : store<false>(to, int(rest), out);
  }
}
// One by one, wherever they lie.
template <class T, class View, class Op>
__global__ void __launch_bounds__(kThreads)
    single_kernel(const __grid_constant__ View view, Both<const T*, const T*> inputs, T* y, int64_t n, Op op) {
  constexpr int kInputs = View::kOperands - 1;
  using F = typename Element<T>::F;
  const T* in[2] = {inputs.first, inputs.second};
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  op.prepare();
  int64_t offsets[kInputs + 1];
  view.locate(i, offsets);
  F values[kInputs][1], out[1];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) values[k][0] = Element<T>::widen(in[k][offsets[k]]);
  op(i, values, out);
  y[offsets[kInputs]] = Element<T>::narrow(out[0]);
}

// Whether 16-byte accesses will do: the innermost dimension is dense in every operand and made of whole vectors, and so are the
// steps between its rows. A dense call is one row of any length.
inline bool whole_vectors(const StridedView* view, int operands, int64_t vector) {
  if (!view) return true;
  const int64_t last = view->dims - 1;
  if (view->sizes[last] % vector) return false;
  for (int64_t k = 0; k < operands; ++k)
    for (int64_t d = 0; d < view->dims; ++d) {
      const int64_t stride = view->strides[k * view->dims + d];
      if (d == last ? stride != 1 : stride % vector != 0) return false;
    }
  return true;
}

template <int kOperands>
StridesByValue<kOperands> by_value(const StridedView* view, int64_t unit) {
  StridesByValue<kOperands> result;
  result.dims = view ? int(view->dims) : 1;
  for (int d = 0; d < result.dims; ++d) {
    const int64_t step = d == result.dims - 1 ? unit : 1;
    result.sizes[d] = view ? view->sizes[d] / step : 0;  // the outermost is never asked for
    for (int k = 0; k < kOperands; ++k) result.strides[k][d] = (view ? view->strides[k * view->dims + d] : 1) * step;
  }
  return result;
}

// The second input is null where kInputs = 1.
template <int kInputs, class Op>
void map_elements(int dtype, const void* first, const void* second, void* y, int64_t n, const StridedView* view, const Op& op,
                  Where where) {
  constexpr int kOperands = kInputs + 1;
  const bool wide = aligned(first, second, y) && whole_vectors(view, kOperands, vector_size(dtype));
  with_type(dtype, wide, [&](auto type, auto kWide) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto kernel, const auto& operands, int64_t elements) {
      simt::launch(kernel, simt::Grid(divide_up(n, elements)), dim3(kThreads), 0, simt::Stream{where.first, where.second},
                   operands, Both<const T*, const T*>{static_cast<const T*>(first), static_cast<const T*>(second)},
                   static_cast<T*>(y), n, op);
    };
    using Dense = DenseView<T, kOperands>;
    using Strided = StridesByValue<kOperands>;
    if constexpr (!kWide.value)
      run(single_kernel<T, Strided, Op>, by_value<kOperands>(view, 1), kThreads);
    else if (view)
      run(vector_kernel<T, Strided, Op>, by_value<kOperands>(view, kVector<T>), kThreads * Strided::kVectors * kVector<T>);
    else
      run(vector_kernel<T, Dense, Op>, Dense{}, kThreads * Dense::kVectors * kVector<T>);
  });
}

}  // namespace cuda
}  // namespace pyckpt
