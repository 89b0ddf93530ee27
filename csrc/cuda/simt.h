// The one door of CUDA kernels to the machine: launch, shared memory, and what of the CUDA language they may use.
//
// Under nvcc these are CUDA's own. With PYCKPT_SIMT_EMULATED a host compiler takes the same .cu file, and tests/simt gives it
// the language: each CUDA thread is a fiber, in an order that the test chooses, and a checking build watches every access.
// Nothing of that is in a wheel.
//
// Rules for code in csrc/cuda, which keep it runnable and checkable there:
//   * C++17. Launch through simt::launch, never <<<>>>; host code calls nothing of the CUDA runtime itself.
//   * Shared memory: SIMT_SHARED for arrays of a fixed size, SIMT_DYNAMIC_SHARED and take() for others. Every thread takes the
//     same arrays in the same order. Both put red zones between arrays where they are checked.
//   * Inline PTX only in ptx.h. No __CUDA_ARCH__ elsewhere; no CUB, Thrust, cooperative groups.
//   * 16-bit types are for loads and stores; arithmetic is in float or double, by math.h, whose `fused` says what is contracted.
//   * Threads are ordered by __syncthreads and __syncwarp alone: neither warps in lockstep nor a shuffle order memory. Of a block
//     every thread reaches each __syncthreads; of a warp every lane in the mask reaches each *_sync, from the same call.
//   * Blocks of a launch share no memory that one of them writes, but through atomics.
//   * Index arithmetic in int64_t. Vector accesses are aligned to their size. No member is named threadIdx, blockIdx, blockDim
//     or gridDim.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#if defined(PYCKPT_SIMT_EMULATED)
#include "emulated.h"
#elif defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace simt {

// Where a launch goes: the device's index, and one of its streams (0: the default one) as torch gives it to Python.
struct Stream {
  int device;
  intptr_t handle;
};

#if defined(PYCKPT_SIMT_EMULATED) || defined(__CUDACC__)  // other code of the host sees no more than that

// Dimensions of a grid from sizes of any magnitude. Throws where CUDA has no grid so large; one of no blocks launches nothing.
struct Grid {
  explicit Grid(int64_t x, int64_t y = 1, int64_t z = 1) : blocks(unsigned(x), unsigned(y), unsigned(z)) {
    if (x < 0 || y < 0 || z < 0 || x > 0x7fffffff || y > 65535 || z > 65535)
      throw std::invalid_argument("a CUDA grid cannot have " + std::to_string(x) + " x " + std::to_string(y) + " x " +
                                  std::to_string(z) + " blocks");
  }
  bool empty() const { return !blocks.x || !blocks.y || !blocks.z; }
  dim3 blocks;
};

// Bytes that take<T>(count) uses, for the launch's `shared_bytes`: the sum over what the kernel takes.
template <class T>
__host__ __device__ constexpr size_t shared_size(size_t count) {
  return (count * sizeof(T) + 15) / 16 * 16;
}

#endif
}  // namespace simt

#if defined(PYCKPT_SIMT_EMULATED)
#include "emulated_launch.h"
#elif defined(__CUDACC__)

namespace simt {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::string text = std::string("CUDA: ") + what + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")";
  if (status == cudaErrorNoKernelImageForDevice)
    text += "; pyckpt was not built for this GPU: set PYCKPT_CUDA_ARCHS to its architecture and reinstall";
  throw std::runtime_error(text);
}

// Makes a device the current one for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device == before_) return;
    check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Runs kernel(arguments...) on grid x block threads. Returns at once; throws if the launch is refused.
template <class... P, class... A>
void launch(void (*kernel)(P...), Grid grid, dim3 block, size_t shared_bytes, Stream stream, A&&... arguments) {
  if (grid.empty()) return;
  const DeviceGuard guard(stream.device);
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), "shared memory");
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream.handle);
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
  if (status != cudaSuccess) cudaGetLastError();  // or torch would take it for its own
  check(status, "launch");
}

// Carves arrays, aligned to 16 bytes, from the launch's dynamic shared memory.
class SharedMemory {
 public:
  __device__ explicit SharedMemory(unsigned char* start) : next_(start) {}
  template <class T>
  __device__ __forceinline__ T* take(size_t count) {
    T* const array = reinterpret_cast<T*>(next_);
    next_ += shared_size<T>(count);
    return array;
  }

 private:
  unsigned char* next_;
};

}  // namespace simt

#define SIMT_SHARED(type, name, extents) __shared__ __align__(16) type name extents
#define SIMT_DYNAMIC_SHARED(name)                                \
  extern __shared__ __align__(128) unsigned char simt_shared_[]; \
  ::simt::SharedMemory name(simt_shared_)

#endif
