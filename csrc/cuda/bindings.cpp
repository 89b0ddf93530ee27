#include "bindings.h"

#include "../bindings.h"
#include "kernels.h"

namespace pyckpt {
namespace {

using Heads = std::array<int64_t, 4>;  // address, strides of batch, head and row

HeadsView view(const Heads& x) { return {pointer(Address(x[0])), x[1], x[2], x[3]}; }

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

// What both attention launchers take first. sizes: batch, heads, kv heads, queries, keys, width, reach. views: of q, k, v and the
// output, each an address and three strides.
AttentionArguments attention_arguments(int dtype, const std::array<int64_t, 7>& sizes, const std::array<Heads, 4>& views,
                                       Address logsumexp, double scale, double dropout_p, Address seed) {
  return {dtype,
          sizes[0],
          sizes[1],
          sizes[2],
          sizes[3],
          sizes[4],
          sizes[5],
          scale,
          sizes[6],
          dropout_p,
          pointer<int64_t>(seed),
          view(views[0]),
          view(views[1]),
          view(views[2]),
          view(views[3]),
          pointer<float>(logsumexp)};
}

void attention_forward(int dtype, const std::array<int64_t, 7>& sizes, const std::array<Heads, 4>& views, Address logsumexp,
                       double scale, double dropout_p, Address seed, cuda::Where where) {
  cuda::attention_forward(attention_arguments(dtype, sizes, views, logsumexp, scale, dropout_p, seed), where);
}

// gradients: of the output, q, k and v; address 0 where none is wanted.
void attention_backward(int dtype, const std::array<int64_t, 7>& sizes, const std::array<Heads, 4>& views, Address logsumexp,
                        double scale, double dropout_p, Address seed, const std::array<Heads, 4>& gradients, Address rows,
                        cuda::Where where) {
  cuda::attention_backward(attention_arguments(dtype, sizes, views, logsumexp, scale, dropout_p, seed),
                           {view(gradients[0]), view(gradients[1]), view(gradients[2]), view(gradients[3]), pointer<float>(rows)},
                           where);
}

}  // namespace

void bind_cuda(pybind11::module_& module) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  Bindings<Cuda>::define(module);
  module.def("attention_forward", &attention_forward, Release());
  module.def("attention_backward", &attention_backward, Release());
}

}  // namespace pyckpt
