// A product on tensor cores: tiles come by cp.async, fragments by ldmatrix.
#include "ptx.h"
#include "samples.h"

namespace samples {
namespace {

constexpr int kRows = 32, kColumns = 16, kInner = 16, kStride = kInner + 8;  // no bank conflicts in ldmatrix

// Rows past the end are zeros.
template <class T>
__device__ void load_tile(T* tile, const T* from, int64_t first, int64_t rows, int64_t inner, int64_t k, int count) {
  for (int i = threadIdx.x; i < count * 2; i += blockDim.x) {
    const int row = i / 2, half = i % 2 * 8;
    const bool valid = first + row < rows;
    simt::cp_async_16(tile + row * kStride + half, from + (valid ? (first + row) * inner + k + half : 0), valid);
  }
}

// Two warps, one for each 16 rows of the tile.
template <class T>
__global__ void matmul_kernel(const T* a, const T* b, float* c, int64_t m, int64_t n, int64_t inner) {
  SIMT_DYNAMIC_SHARED(shared);
  T* const tile_a = shared.take<T>(kRows * kStride);
  T* const tile_b = shared.take<T>(kColumns * kStride);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.y) * kRows, column = int64_t(blockIdx.x) * kColumns;
  float d[2][4] = {};
  for (int64_t k = 0; k < inner; k += kInner) {
    __syncthreads();  // the last tiles have been read
    load_tile(tile_a, a, row, m, inner, k, kRows);
    load_tile(tile_b, b, column, n, inner, k, kColumns);
    simt::cp_async_commit();
    simt::cp_async_wait<0>();
    __syncthreads();
    uint32_t fa[4], fb[4];
    simt::ldmatrix_x4(fa, tile_a + (warp * 16 + lane % 16) * kStride + lane / 16 * 8);
    simt::ldmatrix_x4(fb, tile_b + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8);
    const uint32_t left[2] = {fb[0], fb[1]}, right[2] = {fb[2], fb[3]};
    simt::mma_m16n8k16<T>(d[0], fa, left);
    simt::mma_m16n8k16<T>(d[1], fa, right);
  }
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i) {
      const int64_t y = row + warp * 16 + lane / 4 + i / 2 * 8, x = column + half * 8 + lane % 4 * 2 + i % 2;
      if (y < m && x < n) c[y * n + x] = d[half][i];
    }
}

template <class T>
void launch_matmul(const void* a, const void* b, float* c, int64_t m, int64_t n, int64_t k) {
  const size_t bytes = simt::shared_size<T>(kRows * kStride) + simt::shared_size<T>(kColumns * kStride);
  simt::launch(&matmul_kernel<T>, simt::Grid((n + kColumns - 1) / kColumns, (m + kRows - 1) / kRows), dim3(64), bytes,
               simt::Stream{0, 0}, static_cast<const T*>(a), static_cast<const T*>(b), c, m, n, k);
}

}  // namespace

void matmul(bool bf16, const void* a, const void* b, float* c, int64_t m, int64_t n, int64_t k) {
  if (bf16)
    launch_matmul<__nv_bfloat16>(a, b, c, m, n, k);
  else
    launch_matmul<__half>(a, b, c, m, n, k);
}

}  // namespace samples
