// Reductions over a block: in static shared memory, and in dynamic shared memory over two dimensions.
#include "samples.h"
#include "simt.h"

namespace samples {
namespace {

__device__ float warp_sum(float value) {
  for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

__device__ float block_sum(float value) {
  SIMT_SHARED(float, partial, [32]);
  value = warp_sum(value);
  __syncthreads();  // who read the last sum is done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += partial[warp];
  return sum;
}

__global__ void layer_norm_kernel(const float* x, float* y, int64_t columns, float eps) {
  x += int64_t(blockIdx.x) * columns;
  y += int64_t(blockIdx.x) * columns;
  float sum = 0.0f, squares = 0.0f;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) sum += x[i];
  const float mean = block_sum(sum) / float(columns);
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
  const float rstd = rsqrtf(block_sum(squares) / float(columns) + eps);
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) y[i] = (x[i] - mean) * rstd;
}

constexpr int kGroups = 8;

__global__ void column_sums_kernel(const float* x, float* sums, int64_t rows, int64_t columns) {
  SIMT_DYNAMIC_SHARED(shared);
  float* const tile = shared.take<float>(kGroups * 33);
  const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (column < columns)
    for (int64_t row = threadIdx.y; row < rows; row += kGroups) sum += x[row * columns + column];
  tile[threadIdx.y * 33 + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    float total = 0.0f;
    for (int group = 0; group < kGroups; ++group) total += tile[group * 33 + threadIdx.x];
    sums[column] = total;
  }
}

}  // namespace

void layer_norm(const float* x, float* y, int64_t rows, int64_t columns, float eps, int threads) {
  simt::launch(&layer_norm_kernel, simt::Grid(rows), dim3(threads), 0, simt::Stream{0, 0}, x, y, columns, eps);
}

void column_sums(const float* x, float* sums, int64_t rows, int64_t columns) {
  simt::launch(&column_sums_kernel, simt::Grid((columns + 31) / 32), dim3(32, kGroups), simt::shared_size<float>(kGroups * 33),
               simt::Stream{0, 0}, x, sums, rows, columns);
}

}  // namespace samples
