// What every CPU kernel file shares: element types, dtype dispatch, threads, row views.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../math.h"

// Each file is compiled once per instruction set into a namespace of its own (CMakeLists.txt defines PYCKPT_ISA): were
// anything here shared, the linker could keep the AVX-512 copy of a function for a machine without AVX-512.
namespace pyckpt {
namespace PYCKPT_ISA {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <class T>
using arithmetic = typename Arithmetic<T>::type;  // 16-bit types compute in float

PYCKPT_HD float load(const float* p) { return *p; }
PYCKPT_HD double load(const double* p) { return *p; }
PYCKPT_HD float load(const bfloat16* p) { return from_bits(uint32_t(p->bits) << 16); }
// Integer conversions, so that the loop around them vectorises on every instruction set.
PYCKPT_HD float load(const float16* p) {
  const uint32_t sign = uint32_t(p->bits & 0x8000u) << 16, shifted = uint32_t(p->bits & 0x7fffu) << 13;
  const uint32_t subnormal = to_bits(from_bits(shifted + (113u << 23)) - from_bits(113u << 23));
  const uint32_t normal_ = shifted + (112u << 23), special = shifted | 0x7f800000u;
  const uint32_t magnitude = shifted < 0x00800000u ? subnormal : shifted < 0x0f800000u ? normal_ : special;
  return from_bits(sign | magnitude);
}

PYCKPT_HD void store(float* p, float x) { *p = x; }
PYCKPT_HD void store(double* p, double x) { *p = x; }
// Round to nearest even; NaN stays NaN.
PYCKPT_HD void store(bfloat16* p, float x) {
  const uint32_t b = to_bits(x), rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  p->bits = uint16_t((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
PYCKPT_HD void store(float16* p, float x) {
  const uint32_t b = to_bits(x), magnitude = b & 0x7fffffffu, sign = (b >> 16) & 0x8000u;
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  const uint32_t normal_ = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude < 0x38800000u ? subnormal : magnitude < 0x47800000u ? normal_ : special;
  p->bits = uint16_t(sign | half);
}

// dtype codes of the Python side (pyckpt/ops/_native.py).
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

template <class T>
struct Type {
  using type = T;
};
// Calls f(Type<T>{}) with the element type of a dtype code; the Python side has checked the code.
template <class F>
static inline void with_dtype(int dtype, F&& f) {
  switch (dtype) {
    case kFloat32: return f(Type<float>{});
    case kBFloat16: return f(Type<bfloat16>{});
    case kFloat16: return f(Type<float16>{});
    default: return f(Type<double>{});
  }
}

// The process's OpenMP runtime is torch's. Its symbols are looked up by name when the module is loaded, so nothing is
// linked and no second runtime appears; without one, kernels run on the calling thread.
extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

PYCKPT_HD int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PYCKPT_HD int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
PYCKPT_HD int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(begin, end) on disjoint ranges that cover [0, n), whose bounds are multiples of `unit`. `grain` is the least
// work worth a thread. What body computes for an index must not depend on the range it came in.
template <class Body>
static inline void parallel_for(int64_t n, int64_t unit, int64_t grain, int num_threads, const Body& body) {
  if (n <= 0) return;
  const int64_t units = divide_up(n, unit);
  const int64_t useful = larger(1, n / larger(1, grain));
  const int threads = int(smaller(smaller(useful, units), num_threads));
  if (threads <= 1 || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) return body(int64_t(0), n);
  struct Task {
    const Body* body;
    int64_t n, unit, units;
    static void run(void* data) {
      const Task& task = *static_cast<Task*>(data);
      const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
      const int64_t begin = task.units * thread / count * task.unit;
      const int64_t end = smaller(task.n, task.units * (thread + 1) / count * task.unit);
      if (begin < end) (*task.body)(begin, end);
    }
  } task{&body, n, unit, units};
  GOMP_parallel(&Task::run, &task, unsigned(threads), 0);
}

constexpr int64_t kGrain = 16384;  // elements; below this a second thread costs more than it saves

// Rows of a matrix whose row i starts at element (i / inner) * outer_stride + (i % inner) * inner_stride; columns adjacent.
struct Rows {
  int64_t count, inner, outer_stride, inner_stride;
  int64_t offset(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

// Sum of term(i) over [0, n): chunks in vector lanes, chunk sums in double, so that the error does not grow with n.
template <class F, class Term>
PYCKPT_HD F sum_over(int64_t n, const Term& term) {
  double total = 0;
  for (int64_t start = 0; start < n; start += 1024) {
    const int64_t count = smaller(1024, n - start);
    F a = 0, b = 0, c = 0, d = 0;
    int64_t done = 0;
    if (count >= 256) {  // four independent chains hide the latency of the additions
      const int64_t quarter = count / 64 * 16;
#pragma omp simd reduction(+ : a, b, c, d)
      for (int64_t i = 0; i < quarter; ++i) {
        a += term(start + i);
        b += term(start + quarter + i);
        c += term(start + 2 * quarter + i);
        d += term(start + 3 * quarter + i);
      }
      done = 4 * quarter;
    }
#pragma omp simd reduction(+ : a)
    for (int64_t i = done; i < count; ++i) a += term(start + i);
    total += double((a + b) + (c + d));
  }
  return F(total);
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
