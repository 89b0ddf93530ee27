// Elementwise kernels over operands of one shape and any strides.
#pragma once

#include "common.h"
#include "kernels.h"

namespace pyckpt {
namespace PYCKPT_ISA {


static inline int64_t element_count(const StridedView& view) {
  int64_t n = 1;
  for (int64_t d = 0; d < view.dims; ++d) n *= view.sizes[d];
  return n;
}

constexpr int64_t kBlock = 512;  // elements staged at once when an operand is not dense: stays in the first-level cache
constexpr int64_t kMaxDims = 64;

// Copies logical elements [begin, begin + count) of an operand between memory and a dense buffer, run by run along the
// last dimension.
template <bool kGather, class T>
static inline void copy_block(const StridedView& view, const int64_t* strides, T* base, int64_t begin, int64_t count, T* buffer) {
  int64_t index[kMaxDims], offset = 0, rest = begin;
  const int64_t last = view.dims - 1;
  for (int64_t d = last; d >= 0; --d) {
    index[d] = rest % view.sizes[d];
    rest /= view.sizes[d];
    offset += index[d] * strides[d];
  }
  const int64_t step = strides[last];
  for (int64_t done = 0; done < count;) {
    const int64_t run = smaller(view.sizes[last] - index[last], count - done);
    T* from = base + offset;
    for (int64_t i = 0; i < run; ++i) {
      if (kGather)
        buffer[done + i] = from[i * step];
      else
        from[i * step] = buffer[done + i];
    }
    done += run;
    index[last] += run;
    offset += run * step;
    for (int64_t d = last; d > 0 && index[d] == view.sizes[d]; --d) {  // carry
      offset += strides[d - 1] - index[d] * strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

// kernel(begin, count, in0, [in1,] out) computes dense logical elements [begin, begin + count). With view == nullptr the
// operands are dense in one common order and `begin` counts in that order.
template <class T, class Kernel>
static inline void map_unary(const StridedView* view, int64_t n, const T* x, T* y, int threads, const Kernel& kernel) {
  if (!view)
    return parallel_for(n, 64, kGrain, threads, [&](int64_t begin, int64_t end) { kernel(begin, end - begin, x + begin, y + begin); });
  parallel_for(element_count(*view), kBlock, kGrain, threads, [&](int64_t begin, int64_t end) {
    T in[kBlock], out[kBlock];
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t count = smaller(kBlock, end - start);
      copy_block<true>(*view, view->strides, const_cast<T*>(x), start, count, in);
      kernel(start, count, in, out);
      copy_block<false>(*view, view->strides + view->dims, y, start, count, out);
    }
  });
}

template <class T, class Kernel>
static inline void map_binary(const StridedView* view, int64_t n, const T* a, const T* b, T* y, int threads, const Kernel& kernel) {
  if (!view)
    return parallel_for(n, 64, kGrain, threads,
                        [&](int64_t begin, int64_t end) { kernel(begin, end - begin, a + begin, b + begin, y + begin); });
  parallel_for(element_count(*view), kBlock, kGrain, threads, [&](int64_t begin, int64_t end) {
    T in0[kBlock], in1[kBlock], out[kBlock];
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t count = smaller(kBlock, end - start);
      copy_block<true>(*view, view->strides, const_cast<T*>(a), start, count, in0);
      copy_block<true>(*view, view->strides + view->dims, const_cast<T*>(b), start, count, in1);
      kernel(start, count, in0, in1, out);
      copy_block<false>(*view, view->strides + 2 * view->dims, y, start, count, out);
    }
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
