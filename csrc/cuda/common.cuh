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

constexpr int kMaxDims = 64;  // torch has no more

template <class T>
struct Type {
  using type = T;
};

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
// Made word by word: of a store of the union the compiler may make one for each element.
PYCKPT_DEVICE uint4 packed(const float (&x)[4], Type<float>) {
  return make_uint4(to_bits(x[0]), to_bits(x[1]), to_bits(x[2]), to_bits(x[3]));
}
PYCKPT_DEVICE uint32_t pair_of(float low, float high, Type<__nv_bfloat16>) {
  union {
    __nv_bfloat162 pair;
    uint32_t word;
  } both;
  both.pair = __floats2bfloat162_rn(low, high);
  return both.word;
}
PYCKPT_DEVICE uint32_t pair_of(float low, float high, Type<__half>) {
  union {
    __half2 pair;
    uint32_t word;
  } both;
  both.pair = __floats2half2_rn(low, high);
  return both.word;
}
template <class T>
PYCKPT_DEVICE uint4 packed(const float (&x)[8], T type) {
  return make_uint4(pair_of(x[0], x[1], type), pair_of(x[2], x[3], type), pair_of(x[4], x[5], type), pair_of(x[6], x[7], type));
}
template <bool kWide, class T>
PYCKPT_DEVICE void store(T* p, int valid, const typename Element<T>::F (&values)[kVector<T>]) {
  if constexpr (kWide) {
    *reinterpret_cast<uint4*>(p) = packed(values, Type<T>{});
  } else {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i)
      if (i < valid) p[i] = Element<T>::narrow(values[i]);
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

// A team of threads works on one row at a time, each thread on chunks of kVector elements: element i belongs to chunk i /
// kVector, and chunk j to thread j % team. Teams have 8 to 512 threads, by the length of a row; blockDim is (team, teams). Up to
// kChunks chunks a thread stay in registers; kChunks = 0: longer rows are read again in each pass. What a thread sums, and in
// which order, depends on the length and T alone, with 16-byte accesses and without.
constexpr int kLargestTeam = 512, kSmallestBlock = 128;

template <class T_, int kChunks_, bool kWide_>
struct Layout {
  using T = T_;
  using F = typename Element<T>::F;
  static constexpr int kChunks = kChunks_, kSlots = kChunks ? kChunks : 1, kElements = kVector<T>;
  static constexpr bool kWide = kWide_, kInRegisters = kChunks > 0;

  static bool fits(int64_t n) { return n <= int64_t(kLargestTeam) * kChunks * kElements; }
  static dim3 block(int64_t n) {
    int team = kInRegisters ? 8 : kLargestTeam;
    while (kInRegisters && int64_t(team) * kChunks * kElements < n) team *= 2;
    return dim3(team, team <= 32 ? kSmallestBlock / team : 1);
  }
  static simt::Grid grid(int64_t rows, int64_t n) {
    const int64_t blocks = divide_up(rows, block(n).y);
    return simt::Grid(blocks < 0x7fffffff ? blocks : 0x7fffffff);
  }

  // body(row, n) for each of this team's rows, of n columns. All threads of a block call it as often, to meet in `reduce`: those
  // left without a row are given the last one again, with n = 0.
  template <class Body>
  PYCKPT_DEVICE void each_row(int64_t rows, int64_t n, const Body& body) {
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows; first += int64_t(gridDim.x) * blockDim.y) {
      const int64_t row = first + threadIdx.y;
      body(smaller(row, rows - 1), row < rows ? n : 0);
    }
  }

  // visit(slot, column, valid) for each of this thread's chunks that begin before column n. With 16-byte accesses `valid` is
  // all of them, also beyond n.
  template <class Visit>
  PYCKPT_DEVICE void each_chunk(int64_t n, const Visit& visit) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int slot = 0; slot < kChunks; ++slot) {
        const int column = (slot * int(blockDim.x) + int(threadIdx.x)) * kElements;
        if (column < int(n)) visit(slot, column, kWide ? kElements : int(smaller(kElements, n - column)));
      }
    } else {
      for (int64_t column = int64_t(threadIdx.x) * kElements; column < n; column += int64_t(blockDim.x) * kElements)
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

// Calls body(Layout) with the layout for rows of n elements: the first that fits of kChunks..., else that of long rows.
template <class T, bool kWide, int kChunks = 0, int... kMore, class Body>
void with_layout(int64_t n, const Body& body) {
  using L = Layout<T, kChunks, kWide>;
  if (!L::kInRegisters || L::fits(n)) return body(L{});
  if constexpr (L::kInRegisters) with_layout<T, kWide, kMore...>(n, body);
}

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
template <class V, class Combine>
PYCKPT_DEVICE V reduce(V value, const Combine& combine, int& phase) {
  const int team = int(blockDim.x), warps = team / 32;
  for (int lanes = (team < 32 ? team : 32) / 2; lanes; lanes /= 2) value = combine(value, exchange(value, lanes));
  if (warps <= 1) return value;
  SIMT_SHARED(V, parts, [2][kLargestTeam / 32]);
  if (threadIdx.x % 32 == 0) parts[phase][threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[phase][threadIdx.x % warps];
  phase ^= 1;
  for (int lanes = warps / 2; lanes; lanes /= 2) value = combine(value, exchange(value, lanes));
  return value;
}
// A thread's part of a sum of products. Threads' parts are added in double, as on the CPU: a few roundings more in float would be
// most of a short sum's error. kCancels: most of it may cancel, and what is left is to have all of T's digits.
template <class T, bool kCancels = false>
struct Part {
  float sum = 0;
  PYCKPT_MEMBER void add(float a, float b = 1) { sum = fused(a, b, sum); }
  PYCKPT_MEMBER double value() const { return double(sum); }
};
template <>
struct Part<float, true> {
  double sum = 0;
  PYCKPT_MEMBER void add(float a, float b = 1) { sum = fused(double(a), double(b), sum); }
  PYCKPT_MEMBER double value() const { return sum; }
};
// Ogita, Rump & Oishi, "Accurate sum and dot product", 2005: `rest` is what the sum has lost to rounding.
struct Compensated {
  double sum, rest;
  PYCKPT_MEMBER double value() const { return rest - rest == 0.0 ? sum + rest : sum; }  // not finite: sum says how
};
PYCKPT_DEVICE Compensated exchange(const Compensated& x, int lanes) { return {exchange(x.sum, lanes), exchange(x.rest, lanes)}; }
template <bool kCancels>
struct Part<double, kCancels> {
  double sum = 0, rest = 0;
  PYCKPT_MEMBER void add(double a, double b = 1) {
    const double product = a * b, next = sum + product, taken = next - sum;
    rest += ((sum - (next - taken)) + (product - taken)) + fused(a, b, -product);
    sum = next;
  }
  PYCKPT_MEMBER Compensated value() const { return {sum, rest}; }
};
struct Add {
  PYCKPT_MEMBER double operator()(double a, double b) const { return a + b; }
  PYCKPT_MEMBER Compensated operator()(const Compensated& a, const Compensated& b) const {
    const double next = a.sum + b.sum, taken = next - a.sum;
    return {next, (a.rest + b.rest) + ((a.sum - (next - taken)) + (b.sum - taken))};
  }
  template <class V>
  PYCKPT_MEMBER Both<V, V> operator()(const Both<V, V>& a, const Both<V, V>& b) const {
    return {(*this)(a.first, b.first), (*this)(a.second, b.second)};
  }
};
PYCKPT_DEVICE double rounded(double x) { return x; }
PYCKPT_DEVICE double rounded(const Compensated& x) { return x.value(); }

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
