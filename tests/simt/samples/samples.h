// Launchers of the sample kernels. `bug` plants the bug that the kernel is about.
#pragma once

#include <cstdint>

namespace samples {

// y = (x - mean) / sqrt(variance + eps) for each row.
void layer_norm(const float* x, float* y, int64_t rows, int64_t columns, float eps, int threads);
// Sums of columns, in a fixed order.
void column_sums(const float* x, float* sums, int64_t rows, int64_t columns);
// c = a b^T with a: m x k, b: n x k (bf16, or fp16) and c in float; k is a multiple of 16.
void matmul(bool bf16, const void* a, const void* b, float* c, int64_t m, int64_t n, int64_t k);

// Each reads `x` and writes `y`, of n floats.
void run(const char* name, bool bug, const float* x, float* y, int64_t n);
void refused(const char* how);  // launches that CUDA refuses
const char* const* names();

}  // namespace samples
