// Element types, 16-byte accesses, and teams of threads that share a row.
#pragma once

#include "../arguments.h"
#include "../row_math.h"
#include "kernels.h"
#include "simt.h"

namespace pyckpt {
namespace cuda {

#define PYCKPT_DEVICE static __device__ __forceinline__
#define PYCKPT_MEMBER __device__ __forceinline__

// Element types: `F` is the type of the arithmetic, conversions round to nearest even.
template <class T>
struct Element {  // float and double
  using F = T;
  PYCKPT_DEVICE T widen(T x) { return x; }
  PYCKPT_DEVICE T narrow(T x) { return x; }
};
template <>
struct Element<__nv_bfloat16> {
  using F = float;
  PYCKPT_DEVICE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  PYCKPT_DEVICE __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
};
template <>
struct Element<__half> {
  using F = float;
  PYCKPT_DEVICE float widen(__half x) { return __half2float(x); }
  PYCKPT_DEVICE __half narrow(float x) { return __float2half_rn(x); }
};

template <class T>
constexpr int kVector = 16 / int(sizeof(T));  // elements that a thread takes at once

template <class T>
union Vector {
  uint4 raw;
  T element[kVector<T>];
};

// `valid` elements from p on, in one access of 16 bytes (all of them are there, p is aligned) or one by one; the others 0.
template <bool kWide, class T>
PYCKPT_DEVICE uint4 load(const T* p, int valid) {
  if constexpr (kWide) {
    return *reinterpret_cast<const uint4*>(p);
  } else {
    Vector<T> v;
    v.raw = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i)
      if (i < valid) v.element[i] = p[i];
    return v.raw;
  }
}
template <class T>
PYCKPT_DEVICE void widen(uint4 raw, typename Element<T>::F (&values)[kVector<T>]) {
  Vector<T> v;
  v.raw = raw;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] = Element<T>::widen(v.element[i]);
}
template <bool kWide, class T>
PYCKPT_DEVICE void store(T* p, int valid, const typename Element<T>::F (&values)[kVector<T>]) {
  Vector<T> v;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) v.element[i] = Element<T>::narrow(values[i]);
  if constexpr (kWide) {
    *reinterpret_cast<uint4*>(p) = v.raw;
  } else {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i)
      if (i < valid) p[i] = v.element[i];
  }
}

PYCKPT_HD int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PYCKPT_HD int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Quotient and remainder of non-negative numbers: 64-bit division takes some seventy instructions, and most sizes are small.
struct Division {
  int64_t quotient, remainder;
};
PYCKPT_DEVICE Division divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    const uint32_t q = uint32_t(a) / uint32_t(b);
    return {q, int64_t(uint32_t(a) - q * uint32_t(b))};
  }
  const int64_t q = a / b;
  return {q, a - q * b};
}

// A team of kThreads threads works on one row at a time, each thread on chunks of kVector elements: element i belongs to chunk
// i / kVector, and chunk j to thread j % kThreads. Rows of up to kThreads * kChunks chunks stay in registers; kChunks = 0: longer
// ones are read again in each pass. What a thread sums, and in which order, is the same with 16-byte accesses and without.
template <class T_, int kThreads_, int kChunks_, bool kWide_>
struct Layout {
  using T = T_;
  using F = typename Element<T>::F;
  static constexpr int kThreads = kThreads_, kChunks = kChunks_, kSlots = kChunks ? kChunks : 1, kElements = kVector<T>;
  static constexpr bool kWide = kWide_, kInRegisters = kChunks > 0;
  static constexpr int kTeams = kThreads == 32 ? 4 : 1;  // a block
  static constexpr int kBlock = kThreads * kTeams;

  static dim3 block() { return dim3(kThreads, kTeams); }
  static simt::Grid grid(int64_t rows) {
    const int64_t blocks = divide_up(rows, kTeams);
    return simt::Grid(blocks < 0x7fffffff ? blocks : 0x7fffffff);
  }
  PYCKPT_DEVICE int64_t first_row() { return int64_t(blockIdx.x) * kTeams + threadIdx.y; }
  PYCKPT_DEVICE int64_t row_step() { return int64_t(gridDim.x) * kTeams; }

  // visit(slot, column, valid) for each of this thread's chunks that begin before column n. With 16-byte accesses `valid` is
  // all of them, also beyond n.
  template <class Visit>
  PYCKPT_DEVICE void each_chunk(int64_t n, const Visit& visit) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int slot = 0; slot < kChunks; ++slot) {
        const int column = (slot * kThreads + int(threadIdx.x)) * kElements;
        if (column < int(n)) visit(slot, column, kWide ? kElements : int(smaller(kElements, n - column)));
      }
    } else {
      for (int64_t column = int64_t(threadIdx.x) * kElements; column < n; column += kThreads * kElements)
        visit(0, column, kWide ? kElements : int(smaller(kElements, n - column)));
    }
  }
};

// This thread's part of a row: read once and kept as it lies in memory, or read at each use.
template <class L>
class Row {
  using T = typename L::T;

 public:
  PYCKPT_MEMBER Row(const T* row, int64_t n) : row_(row) {
    if constexpr (L::kInRegisters)
      L::each_chunk(n, [&](int slot, int64_t column, int valid) { raw_[slot] = load<L::kWide>(row + column, valid); });
  }
  PYCKPT_MEMBER void get(int slot, int64_t column, int valid, typename L::F (&values)[L::kElements]) const {
    widen<T>(L::kInRegisters ? raw_[slot] : load<L::kWide>(row_ + column, valid), values);
  }

 private:
  const T* row_;
  uint4 raw_[L::kSlots];
};

// Calls body(Layout) with the layout for rows of n elements. It depends on n and T alone.
template <class T, bool kWide, int kMostChunks = 4, class Body>
void with_layout(int64_t n, const Body& body) {
  const int64_t chunks = divide_up(n, kVector<T>);
  if (chunks <= 32) return body(Layout<T, 32, 1, kWide>{});
  if (chunks <= 128) return body(Layout<T, 32, 4, kWide>{});
  if (chunks <= 512) return body(Layout<T, 128, 4, kWide>{});
  if (chunks <= 512 * kMostChunks) return body(Layout<T, 512, kMostChunks, kWide>{});
  body(Layout<T, 512, 0, kWide>{});
}

template <class T>
struct Type {
  using type = T;
};
// Calls body(Type<T>{}, wide) for a dtype code; double has no 16-byte accesses.
template <class Body>
void with_type(int dtype, bool wide, const Body& body) {
  const auto choose = [&](auto type) {
    if (wide) return body(type, std::true_type{});
    body(type, std::false_type{});
  };
  switch (dtype) {
    case kFloat32: return choose(Type<float>{});
    case kBFloat16: return choose(Type<__nv_bfloat16>{});
    case kFloat16: return choose(Type<__half>{});
    default: return body(Type<double>{}, std::false_type{});
  }
}
inline int64_t vector_size(int dtype) { return dtype == kFloat64 ? 2 : dtype == kFloat32 ? 4 : 8; }
template <class... P>
bool aligned(const P*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ... | 0) & 15) == 0;
}

// Sums and maxima over a team, in a fixed order.
PYCKPT_DEVICE double exchange(double x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
PYCKPT_DEVICE float exchange(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
PYCKPT_DEVICE int exchange(int x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
template <class A, class B>
struct Both {
  A first;
  B second;
};
template <class A, class B>
PYCKPT_DEVICE Both<A, B> exchange(const Both<A, B>& x, int lanes) {
  return {exchange(x.first, lanes), exchange(x.second, lanes)};
}

// Every thread of the team gets combine over all of them. `phase` is a variable of the caller's, 0 at first: successive calls use
// two places in turn, so that one barrier each is enough.
template <int kThreads, class V, class Combine>
PYCKPT_DEVICE V reduce(V value, const Combine& combine, int& phase) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) value = combine(value, exchange(value, lanes));
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    SIMT_SHARED(V, parts, [2][kWarps]);
    if (threadIdx.x % 32 == 0) parts[phase][threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[phase][threadIdx.x % kWarps];
    phase ^= 1;
#pragma unroll
    for (int lanes = kWarps / 2; lanes; lanes /= 2) value = combine(value, exchange(value, lanes));
  }
  return value;
}
// Sums of what each thread has summed in F; from there on in double, as on the CPU: a few roundings more would be most of a
// short sum's error.
struct Add {
  PYCKPT_MEMBER double operator()(double a, double b) const { return a + b; }
  PYCKPT_MEMBER Both<double, double> operator()(const Both<double, double>& a, const Both<double, double>& b) const {
    return {a.first + b.first, a.second + b.second};
  }
};

// Dropout factors of elements [first, first + kCount) of a tensor in logical order.
template <int kCount, bool kAligned, class F>
PYCKPT_DEVICE void dropout_factors(const DropoutRule& rule, int64_t first, F (&factors)[kCount]) {
  constexpr int kBlocks = kAligned ? kCount / 4 : (kCount + 6) / 4;
  uint32_t words[4 * kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const PhiloxBlock four = philox(rule.key, uint64_t(first) / 4 + block);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[4 * block + i] = four.word[i];
  }
  const int lead = kAligned ? 0 : int(first & 3);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32_t word = words[i];
    if constexpr (!kAligned) {  // words[lead + i], without indexing registers
#pragma unroll
      for (int j = 1; j < 4; ++j)
        if (lead == j && i + j < 4 * kBlocks) word = words[i + j];
    }
    factors[i] = word >= rule.threshold ? F(rule.keep_scale) : F(0);
  }
}

}  // namespace cuda
}  // namespace pyckpt
