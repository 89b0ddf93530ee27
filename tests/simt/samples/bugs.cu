// One small kernel for each kind of bug that the emulator finds: right without `bug`, when y[i] = x[n - 1 - i] or as said.
#include <cstring>

#include "ptx.h"
#include "samples.h"

namespace samples {
namespace {

constexpr int kThreads = 64;

template <bool bug>
__global__ void missing_barrier(const float* x, float* y, int64_t n) {
  SIMT_SHARED(float, values, [kThreads]);
  values[threadIdx.x] = x[threadIdx.x];
  if (!bug) __syncthreads();
  y[threadIdx.x] = values[n - 1 - threadIdx.x];
}

template <bool bug>
__global__ void missing_barrier_before_reuse(const float* x, float* y, int64_t n) {
  SIMT_SHARED(float, values, [kThreads]);
  for (int turn = 0; turn < 2; ++turn) {
    values[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = values[n - 1 - threadIdx.x];
    if (!bug) __syncthreads();
  }
}

template <bool bug>
__global__ void missing_warp_barrier(const float* x, float* y, int64_t n) {
  SIMT_SHARED(float, values, [kThreads]);
  values[threadIdx.x] = x[n - 1 - (threadIdx.x ^ 1)];
  if (!bug) __syncwarp();
  y[threadIdx.x] = values[threadIdx.x ^ 1];
}

template <bool bug>
__global__ void divergent_barrier(const float* x, float* y, int64_t n) {
  SIMT_SHARED(float, values, [kThreads]);
  values[threadIdx.x] = x[threadIdx.x];
  if (bug && threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  y[threadIdx.x] = values[n - 1 - threadIdx.x];
}

template <bool bug>
__global__ void barrier_after_some_ended(const float* x, float* y, int64_t n) {
  if (bug && threadIdx.x >= 32) return;
  __syncthreads();
  y[threadIdx.x] = x[n - 1 - threadIdx.x];
}

template <bool bug>
__global__ void divergent_shuffle(const float* x, float* y, int64_t n) {
  float value = x[n - 1 - (threadIdx.x ^ 1)];
  if (!bug || threadIdx.x % 32 < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);
  y[threadIdx.x] = value;
}

template <bool bug>
__global__ void shuffle_from_outside(const float* x, float* y, int64_t n) {
  const unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  const int bits = bug ? 16 : 1;
  y[threadIdx.x] = __shfl_xor_sync(half, x[n - 1 - (threadIdx.x ^ bits)], bits);
}

// y[i] = x[i] from here on
template <bool bug>
__global__ void global_past_end(const float* x, float* y, int64_t n) {
  y[threadIdx.x] = x[threadIdx.x] + (bug ? x[n] : 0.0f);
}

template <bool bug>
__global__ void global_before_start(const float* x, float* y, int64_t) {
  const int64_t i = int64_t(threadIdx.x) - (bug ? 1 : 0);
  y[i] = x[threadIdx.x];
}

__device__ float sum_of(const float* values, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += values[i];
  return sum;
}

template <bool bug>
__global__ void static_shared_past_end(const float* x, float* y, int64_t) {
  SIMT_SHARED(float, zeros, [kThreads]);
  SIMT_SHARED(float, behind, [kThreads]);
  zeros[threadIdx.x] = behind[threadIdx.x] = 0.0f;
  __syncthreads();
  y[threadIdx.x] = x[threadIdx.x] + sum_of(zeros, kThreads + (bug ? 1 : 0));
}

template <bool bug>
__global__ void dynamic_shared_past_end(const float* x, float* y, int64_t) {
  SIMT_DYNAMIC_SHARED(shared);
  float* const zeros = shared.take<float>(kThreads);
  float* const behind = shared.take<float>(kThreads);
  zeros[threadIdx.x] = behind[threadIdx.x] = 0.0f;
  __syncthreads();
  y[threadIdx.x] = x[threadIdx.x] + sum_of(zeros, kThreads + (bug ? 1 : 0));
}

template <bool bug>
__global__ void takes_more_than_launched(const float* x, float* y, int64_t) {
  SIMT_DYNAMIC_SHARED(shared);
  float* const values = shared.take<float>(bug ? 3 * kThreads : 2 * kThreads);
  values[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = values[threadIdx.x];
}

template <bool bug>
__global__ void array_index(const float* x, float* y, int64_t n) {
  float values[4] = {};
  const int last = int(n) / kThreads * 4;  // n is kThreads
  for (int i = 0; i < last + (bug ? 1 : 0); ++i) values[i] = x[threadIdx.x];
  y[threadIdx.x] = values[3];
}

template <bool bug>
__global__ void uninitialised_shared(const float* x, float* y, int64_t) {
  SIMT_SHARED(float, values, [kThreads]);
  if (!bug || threadIdx.x != 3) values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = values[threadIdx.x];
}

template <bool bug>
__global__ void uninitialised_global(const float* x, float* y, int64_t) {
  if (!bug) y[threadIdx.x] = 0.0f;
  y[threadIdx.x] += x[threadIdx.x];
}

template <bool bug>
__global__ void misaligned_vector(const float* x, float* y, int64_t n) {
  const int64_t i = int64_t(threadIdx.x) * 4;
  if (i + (bug ? 1 : 0) + 4 <= n) {
    const float4 v = *reinterpret_cast<const float4*>(x + i + (bug ? 1 : 0));
    y[i] = v.x, y[i + 1] = v.y, y[i + 2] = v.z, y[i + 3] = v.w;
  }
}

template <bool bug>
__global__ void deadlock(const float* x, float* y, int64_t) {
  if (bug && threadIdx.x % 32 == 0)
    __syncthreads();
  else
    __syncwarp();
  __syncthreads();
  y[threadIdx.x] = x[threadIdx.x];
}

template <bool bug>
__global__ void race_between_blocks(const float* x, float* y, int64_t) {  // two blocks
  if (blockIdx.x == 0 || bug) y[threadIdx.x] = x[threadIdx.x];
}

// The last of two blocks sums what both wrote: a fence and an atomic, on a counter that is 0 at first, order it after them.
template <bool bug>
__global__ void race_despite_atomic(const float* x, float* y, int64_t n) {
  if (threadIdx.x) return;
  y[blockIdx.x] = x[n - 1 - blockIdx.x];
  if (!bug) __threadfence();
  if (atomicAdd(y + 2, 1.0f) == 1.0f) y[3] = y[0] + y[1];
}

template <bool bug>
__global__ void writes_to_input(const float* x, float* y, int64_t) {
  y[threadIdx.x] = x[threadIdx.x];
  if (bug) const_cast<float*>(x)[threadIdx.x] = y[threadIdx.x];
}

template <bool bug>
__global__ void asynchronous_copy(const float* x, float* y, int64_t) {
  SIMT_SHARED(float, values, [kThreads]);
  if (threadIdx.x < kThreads / 4) simt::cp_async_16(values + threadIdx.x * 4, x + threadIdx.x * 4);
  simt::cp_async_commit();
  simt::cp_async_wait<bug ? 1 : 0>();
  __syncthreads();
  y[threadIdx.x] = values[threadIdx.x];
}

template <bool bug>
__global__ void misaligned_ldmatrix(const float* x, float* y, int64_t) {
  SIMT_SHARED(float, values, [kThreads + 72]);
  for (int i = threadIdx.x; i < kThreads + 72; i += kThreads) values[i] = 0.0f;
  __syncthreads();
  uint32_t r[4];
  simt::ldmatrix_x4(r, values + threadIdx.x % 32 * 4 + (bug ? 1 : 0));
  y[threadIdx.x] = x[threadIdx.x] + __uint_as_float(r[0] | r[1] | r[2] | r[3]);
}

template <bool bug>
__global__ void index_overflow(const float* x, float* y, int64_t n) {
  const int stride = int(n) << 24;  // 2^30
  const int64_t far = bug ? int64_t(stride * 4) : int64_t(stride) * 4;
  y[threadIdx.x] = far ? x[threadIdx.x] : 0.0f;
}

template <bool bug>
__global__ void others_local_memory(const float* x, float* y, int64_t) {
  SIMT_SHARED(const float*, address, [1]);
  float mine = x[threadIdx.x];
  if (threadIdx.x == 0) address[0] = &mine;
  __syncthreads();
  y[threadIdx.x] = bug ? *address[0] : mine;
  __syncthreads();
}

template <bool bug>
__global__ void traps(const float* x, float* y, int64_t) {
  if (bug && threadIdx.x == 5) __trap();
  y[threadIdx.x] = x[threadIdx.x];
}

using Kernel = void (*)(const float*, float*, int64_t);
struct Sample {
  const char* name;
  Kernel right, wrong;
  int blocks, shared_floats;
};
#define SAMPLE(name, ...) {#name, &name<false>, &name<true>, __VA_ARGS__}
const Sample all[] = {
    SAMPLE(missing_barrier, 1, 0),
    SAMPLE(missing_barrier_before_reuse, 1, 0),
    SAMPLE(missing_warp_barrier, 1, 0),
    SAMPLE(divergent_barrier, 1, 0),
    SAMPLE(barrier_after_some_ended, 1, 0),
    SAMPLE(divergent_shuffle, 1, 0),
    SAMPLE(shuffle_from_outside, 1, 0),
    SAMPLE(global_past_end, 1, 0),
    SAMPLE(global_before_start, 1, 0),
    SAMPLE(static_shared_past_end, 1, 0),
    SAMPLE(dynamic_shared_past_end, 1, 2 * kThreads),
    SAMPLE(takes_more_than_launched, 1, 2 * kThreads),
    SAMPLE(array_index, 1, 0),
    SAMPLE(uninitialised_shared, 1, 0),
    SAMPLE(uninitialised_global, 1, 0),
    SAMPLE(misaligned_vector, 1, 0),
    SAMPLE(deadlock, 1, 0),
    SAMPLE(race_between_blocks, 2, 0),
    SAMPLE(race_despite_atomic, 2, 0),
    SAMPLE(writes_to_input, 1, 0),
    SAMPLE(asynchronous_copy, 1, 0),
    SAMPLE(misaligned_ldmatrix, 1, 0),
    SAMPLE(index_overflow, 1, 0),
    SAMPLE(others_local_memory, 1, 0),
    SAMPLE(traps, 1, 0),
};

__global__ void nothing() {}

}  // namespace

void run(const char* name, bool bug, const float* x, float* y, int64_t n) {
  for (const Sample& sample : all)
    if (!std::strcmp(sample.name, name))
      return simt::launch(bug ? sample.wrong : sample.right, simt::Grid(sample.blocks), dim3(kThreads),
                          sample.shared_floats * sizeof(float), simt::Stream{0, 0}, x, y, n);
  throw std::invalid_argument(name);
}

const char* const* names() {
  constexpr size_t count = sizeof all / sizeof *all;
  static const char* list[count + 1] = {};
  for (size_t i = 0; i < count; ++i) list[i] = all[i].name;
  return list;
}

void refused(const char* how) {
  const auto is = [&](const char* what) { return !std::strcmp(how, what); };
  const simt::Stream stream{is("device") ? 1 : 0, 0};
  const size_t bytes = is("shared memory") ? 1 << 20 : 0;
  const int threads = is("threads") ? 1025 : is("no threads") ? 0 : 32;
  const int64_t blocks = is("grid") ? int64_t(1) << 31 : is("empty grid") ? 0 : 1;
  simt::launch(&nothing, simt::Grid(blocks), dim3(threads), bytes, stream);
}

}  // namespace samples
