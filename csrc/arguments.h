// What launchers take, on every device. Pointers are to elements of the dtype code's type.
#pragma once

#include <cstdint>

namespace pyckpt {

// dtype codes of the Python side (pyckpt/ops/_registry.py).
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
enum Activation : int { kGeluErf = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3, kGeluSigmoid = 4 };
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
  void* partial;               // blocks x 2 x columns sums, aligned to 64 bytes; null without parameter gradients
  int64_t blocks;              // of rows, at least 1; depends on shapes alone, and so do the bits of the sums
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

// A tensor of (batch, heads, rows, width) in elements: columns adjacent, rows aligned to 16 bytes.
struct HeadsView {
  void* data;
  int64_t batch, head, row;  // strides
};

// Attention in one kernel, without masks (csrc/cuda/attention.cu).
struct AttentionArguments {
  int dtype;
  int64_t batch, heads, kv_heads, queries, keys, width;
  double scale;
  int64_t reach;  // query i sees keys up to i + reach
  double dropout_p;
  const int64_t* seed;  // null: no dropout
  HeadsView q, k, v, out;
  float* logsumexp;  // batch x heads x queries
};

struct AttentionGradients {
  HeadsView grad, dq, dk, dv;  // without data where no gradient is wanted
  float* rows;  // memory for two numbers a query: batch x heads x 2 x (queries rounded up to 128), aligned to 16 bytes
};

}  // namespace pyckpt
