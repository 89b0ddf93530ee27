// The CUDA language for a host compiler, as far as csrc/cuda/simt.h allows kernels to use it. Types and 16-bit conversions are
// the CUDA toolkit's own, whose headers work on the host.
//
// Call sites are passed along as default arguments, so that a report can name file and line.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>
// after the types
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#undef __shared__
#define __shared__ static_assert(false, "shared memory: SIMT_SHARED or SIMT_DYNAMIC_SHARED");
#undef __launch_bounds__
#define __launch_bounds__(...)
#define warpSize 32

namespace simt {

struct Site {
  const char* file;
  int line;
};
#define SIMT_SITE ::simt::Site site = {__builtin_FILE(), __builtin_LINE()}

struct Thread {
  uint3 index;
  unsigned lane, warp, linear;
};
struct Block {
  uint3 index;
  dim3 size, grid;
};
extern Thread* self;
extern Block block;

enum class Collective : unsigned { shuffle, vote, sync, mma, ldmatrix };
enum class Access : unsigned { read, write, atomic };
// Computes a collective for the whole warp, from and into the arguments of its members.
using WarpFunction = void (*)(void** arguments, unsigned members);

void barrier(Site site);
// `aligned`: the instruction needs all lanes that the warp has.
void collective(unsigned mask, Collective kind, void* argument, WarpFunction function, bool aligned, Site site);
void shuffle_from_inactive(int lane, int source, Site site);
void touch(const volatile void* address, size_t bytes, Access access, void* pc);  // nothing unless in a checking build
void fence();
[[noreturn]] void trap(Site site);

#define SIMT_PC __builtin_extract_return_addr(__builtin_return_address(0))

template <class T>
struct Shuffled {
  T in, out;
  int lane, source;
  Site site;
};
template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8), "as CUDA's shuffles");
  Shuffled<T> mine{value, value, int(self->lane), source, site};
  collective(
      mask, Collective::shuffle, &mine,
      [](void** arguments, unsigned members) {
        for (int lane = 0; lane < 32; ++lane) {
          if (!(members >> lane & 1)) continue;
          auto* me = static_cast<Shuffled<T>*>(arguments[lane]);
          if (members >> me->source & 1) {
            me->out = static_cast<Shuffled<T>*>(arguments[me->source])->in;
          } else {  // undefined in CUDA
            std::memset(static_cast<void*>(&me->out), 0xff, sizeof(T));
            shuffle_from_inactive(lane, me->source, me->site);
          }
        }
      },
      false, site);
  return mine.out;
}
inline int segment(int width) { return int(self->lane) & ~(width - 1); }

// Fibers are not interrupted, so a plain read-modify-write is atomic.
template <class T, class F>
__attribute__((no_sanitize("thread"), noinline)) T atomically(T* address, F next) {
  touch(address, sizeof(T), Access::atomic, SIMT_PC);
  const T before = *address;
  *address = next(before);
  return before;
}

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

}  // namespace simt

#define threadIdx (::simt::self->index)
#define blockIdx (::simt::block.index)
#define blockDim (::simt::block.size)
#define gridDim (::simt::block.grid)

// Barriers
inline void __syncthreads(SIMT_SITE) { simt::barrier(site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) {
  simt::collective(mask, simt::Collective::sync, nullptr, [](void**, unsigned) {}, false, site);
}
inline void __threadfence() { simt::fence(); }
inline void __trap(SIMT_SITE) { simt::trap(site); }

// Shuffles and votes
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_SITE) {
  const int source = int(simt::self->lane) ^ bits;  // towards lower segments is allowed
  return simt::shuffle(mask, value, source < simt::segment(width) + width ? source : int(simt::self->lane), site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
  struct Vote {
    int predicate;
    unsigned result;
  } mine{predicate, 0};
  simt::collective(
      mask, simt::Collective::vote, &mine,
      [](void** arguments, unsigned members) {
        unsigned result = 0;
        for (int lane = 0; lane < 32; ++lane)
          if ((members >> lane & 1) && static_cast<Vote*>(arguments[lane])->predicate) result |= 1u << lane;
        for (int lane = 0; lane < 32; ++lane)
          if (members >> lane & 1) static_cast<Vote*>(arguments[lane])->result = result;
      },
      false, site);
  return mine.result;
}
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) { return __ballot_sync(mask, predicate, site) != 0; }

// Atomics
template <class T>
T atomicAdd(T* address, T value) {
  return simt::atomically(address, [=](T before) { return T(before + value); });
}

// Stores with a cache policy
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}

// Intrinsics. Those that are approximations on a GPU are exact here: results differ in the last bits.
inline float __uint_as_float(unsigned x) { return simt::same_bits<float>(x); }
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
using std::min;
