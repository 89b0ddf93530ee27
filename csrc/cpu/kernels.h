// The table of CPU launchers, one per instruction set. `threads` is the caller's torch.get_num_threads().
#pragma once

#include "../arguments.h"

namespace pyckpt {

// The scores of some rows of queries against some keys. Row i is query `first_row + i % rows` of head `first_head + i / rows`,
// heads being counted through all batch entries; column j is key `first_key + j`.
struct AttentionBlock {
  int dtype, mask_dtype;
  int64_t heads, rows, columns, first_head, first_row, first_key;
  int64_t heads_per_batch, queries, keys;  // sizes of the whole
  // Query i sees keys in [i + low, i + high], of these [first_key, first_key + columns).
  int64_t low, high;
  double scale, softcap;  // softcap 0: none
  int mask_kind;
  const void* mask;
  const int64_t* mask_strides;   // batch, head, query, key
  void* dmask;                   // the gradient of the mask is added to this, in the arithmetic's type; null: not wanted
  const int64_t* dmask_strides;  // as the mask's; 0 or, along keys, 1
  const void* slopes;            // in the arithmetic's type; null: none
  const int64_t* slope_strides;  // batch, head
  int64_t origin;                // ALiBi's distance is that of key and query + origin
  double dropout_p;
  const int64_t* seed;  // null: no dropout
};

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
  void (*attention_forward)(const AttentionBlock& block, void* scores, void* logsumexp, int threads);
  void (*attention_backward)(const AttentionBlock& block, void* scores, void* gradients, int threads);
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
