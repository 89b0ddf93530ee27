// Threads and sums whose results do not depend on the number of threads.
#pragma once

#include "types.h"

// The process's OpenMP runtime is torch's. Its symbols are looked up by name when the module is loaded, so nothing is
// linked and no second runtime appears; without one, kernels run on the calling thread.
extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace pyckpt {
namespace PYCKPT_ISA {

constexpr int64_t kGrain = 16384;  // elements; below this a second thread costs more than it saves

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
template <class Body>
static inline void parallel_rows(int64_t rows, int64_t columns, int num_threads, const Body& body) {
  parallel_for(rows, 1, divide_up(kGrain, larger(1, columns)), num_threads, body);
}

// A row that is needed next. A row's first pass reads memory and its last writes it while those in between compute; asking for
// the next row a little at a time meanwhile keeps both busy. All at once would fill the queue of outstanding reads, and wait.
class Ahead {
 public:
  Ahead(int dtype, const void* base, int64_t offset)
      : size_(item_size(dtype)), row_(static_cast<const char*>(base) + offset * size_) {}
  // Asks for elements [i, i + n), into the second-level cache. What does not exist does no harm.
  void fetch(int64_t i, int64_t n) const {
    for (int64_t byte = 0; byte < n * size_; byte += 64) __builtin_prefetch(row_ + i * size_ + byte, 0, 2);
  }

 private:
  int64_t size_;
  const char* row_;
};

// Sums and maxima run in kLanes chains, element i in chain i % kLanes: enough vectors in flight to hide the latency of an
// addition, and an order that depends neither on the vector width nor on the threads.
constexpr int64_t kLanes = 64;
constexpr int64_t kChunk = 64 * kLanes;  // chunk sums are added in double, so that the error does not grow with n

// Combines sixteen lanes pairwise, as scalars: narrower and narrower vectors would wait for each other's stores.
template <class F, class Combine>
PYCKPT_HD F fold16(const F* lanes, const Combine& combine) {
  const auto four = [&](int64_t j) { return combine(combine(lanes[j], lanes[j + 8]), combine(lanes[j + 4], lanes[j + 12])); };
  return combine(combine(four(0), four(2)), combine(four(1), four(3)));
}
template <class F, class Combine>
PYCKPT_HD F fold(F* lanes, const Combine& combine) {
  for (int64_t width = kLanes / 2; width >= 16; width /= 2) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) lanes[j] = combine(lanes[j], lanes[j + width]);
  }
  return fold16(lanes, combine);
}
// The sum of all lanes, in double: six more roundings in float would be most of a short sum's error.
template <class F>
PYCKPT_HD double total_of(const F* lanes) {
  double sums[16];
#pragma omp simd
  for (int64_t j = 0; j < 16; ++j)
    sums[j] = (double(lanes[j]) + double(lanes[j + 16])) + (double(lanes[j + 32]) + double(lanes[j + 48]));
  return ((((sums[0] + sums[8]) + (sums[4] + sums[12])) + ((sums[2] + sums[10]) + (sums[6] + sums[14]))) +
          (((sums[1] + sums[9]) + (sums[5] + sums[13])) + ((sums[3] + sums[11]) + (sums[7] + sums[15]))));
}
// Of doubles, what the additions lose is added in the end.
PYCKPT_HD double total_of(const double* lanes) {
  double sums[kLanes], lost[kLanes] = {};
  for (int64_t j = 0; j < kLanes; ++j) sums[j] = lanes[j];
  for (int64_t width = kLanes / 2; width >= 1; width /= 2) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const double a = sums[j], b = sums[j + width], s = a + b, t = s - a;
      lost[j] += lost[j + width] + ((a - (s - t)) + (b - t));
      sums[j] = s;
    }
  }
  return __builtin_isfinite(sums[0]) ? sums[0] + lost[0] : sums[0];
}
struct Add {
  template <class F>
  F operator()(F a, F b) const {
    return a + b;
  }
};
struct Larger {  // NaN in b left out
  template <class F>
  F operator()(F a, F b) const {
    return b > a ? b : a;
  }
};

// visit(i, lane) for every i in [0, n), with lane = i % kLanes; before kLanes of them, before(i).
struct Nothing {
  void operator()(int64_t) const {}
};
template <class Visit, class Before = Nothing>
PYCKPT_HD void in_lanes(int64_t n, const Visit& visit, const Before& before = {}) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    before(i);
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) visit(i + j, j);
  }
#pragma omp simd
  for (int64_t j = 0; j < n - i; ++j) visit(i + j, j);
}

template <class F>
struct Pair {
  F first, second;
};

// Sum over [0, n) of term(i), a row in work; of `ahead` as many elements are asked for.
template <class F, int kRows, class Term>
static inline F sum_over(int64_t n, const Term& term, const Ahead (&ahead)[kRows]) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    F lanes[kLanes] = {};
    in_lanes(
        smaller(kChunk, n - start), [&](int64_t i, int64_t j) { lanes[j] += term(start + i); },
        [&](int64_t i) {
          for (const Ahead& row : ahead) row.fetch(start + i, kLanes);
        });
    total += total_of(lanes);
  }
  return F(total);
}

// Sum over [0, n) of a(i) b(i), products unrounded where the processor has a fused multiply-add; before some of them, before(i).
template <class F, class A, class B, class Before = Nothing>
static inline F dot_over(int64_t n, const A& a, const B& b, const Before& before = {}) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    F lanes[kLanes] = {};
    in_lanes(
        smaller(kChunk, n - start), [&](int64_t i, int64_t j) { lanes[j] = fused(a(start + i), b(start + i), lanes[j]); },
        [&](int64_t i) { before(start + i); });
    total += total_of(lanes);
  }
  return F(total);
}

// Sums over [0, n) of both members of term(i), in double; of `ahead` as many elements are asked for.
template <class F, int kRows, class Term>
static inline Pair<double> sum_pairs_over(int64_t n, const Term& term, const Ahead (&ahead)[kRows]) {
  double first = 0, second = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    F a[kLanes] = {}, b[kLanes] = {};
    in_lanes(
        smaller(kChunk, n - start),
        [&](int64_t i, int64_t j) {
          const Pair<F> t = term(start + i);
          a[j] += t.first;
          b[j] += t.second;
        },
        [&](int64_t i) {
          for (const Ahead& row : ahead) row.fetch(start + i, kLanes);
        });
    first += total_of(a);
    second += total_of(b);
  }
  return {first, second};
}

// Maximum over [0, n) of value(i), NaN left out; -infinity where there is none.
template <class F, class Value>
static inline F maximum_over(int64_t n, const Value& value) {
  F lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = -F(__builtin_huge_val());
  in_lanes(n, [&](int64_t i, int64_t j) { lanes[j] = Larger{}(lanes[j], value(i)); });
  return fold(lanes, Larger{});
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
