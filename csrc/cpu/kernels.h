// The table of CPU launchers, one per instruction set. Pointers are to elements of the dtype code's type; `threads` is the
// caller's torch.get_num_threads().
#pragma once

#include <cstdint>

namespace pyckpt {

// dtype codes of the Python side (pyckpt/ops/_registry.py).
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
enum Activation : int { kGeluErf = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3 };
enum Norm : int { kLayerNorm = 0, kRmsNorm = 1 };

// A tensor seen as rows: row i starts at (i / inner) * outer_stride + (i % inner) * inner_stride, its columns are adjacent.
struct RowView {
  int64_t inner, outer_stride, inner_stride;
};

// Sizes and per-operand strides of an elementwise call whose operands are not dense in one common order.
struct StridedView {
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

struct NormArguments {
  int kind, dtype, parameter_dtype;  // parameter_dtype: `dtype`, or float32
  int64_t rows, columns;
  double eps;
  const void *x, *weight, *bias;  // weight and bias: columns, or null
  RowView x_view;
};

struct NormGradients {
  const void *grad, *statistics;  // statistics as norm_forward wrote them
  RowView grad_view;
  void *dx, *dweight, *dbias;  // null where no gradient is wanted
  double* partial;             // blocks x 2 x columns sums; null without parameter gradients
  int64_t blocks;              // of rows, at least 1; fixed by the number of rows alone
};

enum Mask : int { kNoMask = 0, kBooleanMask = 1, kAdditiveMask = 2 };  // boolean: true = keep; additive: in the dtype of x

// Read through strides (elements; zero where it broadcasts).
struct MaskView {
  int kind;
  const void* data;
  const int64_t* row_strides;  // per leading dimension
  int64_t column_stride;
};

struct SoftmaxArguments {
  int dtype;
  const void* x;
  const int64_t* x_strides;  // per leading dimension; columns adjacent
  int64_t dims;              // leading dimensions
  const int64_t* sizes;      // their sizes
  int64_t columns;
  double scale;
  MaskView mask;
  int64_t causal_offset;  // query q sees columns up to q + causal_offset; kNotCausal: all
  double dropout_p;
  const int64_t* seed;  // null: no dropout
};
constexpr int64_t kNotCausal = INT64_MIN;

struct SoftmaxGradients {
  const void* grad;
  const int64_t* grad_strides;  // per leading dimension; columns adjacent
  const void *y, *statistics;   // y, or null: then x and the statistics that softmax_forward wrote
  void* dx;
  double grad_scale;
  bool masked;
};

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
  void (*attention_backward)(const AttentionBlock& block, void* scores, void* gradients, void* dbias, int threads);
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
