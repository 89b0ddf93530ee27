// Elementwise kernels over operands of one shape, any strides and any dtype.
#pragma once

#include "parallel.h"

namespace pyckpt {
namespace PYCKPT_ISA {

static inline int64_t element_count(const StridedView& view) {
  int64_t n = 1;
  for (int64_t d = 0; d < view.dims; ++d) n *= view.sizes[d];
  return n;
}

constexpr int64_t kBlock = 512;  // elements staged at once: a few such blocks stay in the first-level cache
constexpr int64_t kMaxDims = 64;

// Copies logical elements [begin, begin + count) of an operand between memory and a dense buffer, run by run along the
// last dimension. T is an unsigned integer of the element's size.
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
template <bool kGather>
static inline void copy_block(int dtype, const StridedView& view, int64_t operand, void* base, int64_t begin, int64_t count,
                              void* buffer) {
  const int64_t* strides = view.strides + operand * view.dims;
  switch (item_size(dtype)) {
    case 2: return copy_block<kGather>(view, strides, static_cast<uint16_t*>(base), begin, count, static_cast<uint16_t*>(buffer));
    case 4: return copy_block<kGather>(view, strides, static_cast<uint32_t*>(base), begin, count, static_cast<uint32_t*>(buffer));
    default:
      return copy_block<kGather>(view, strides, static_cast<uint64_t*>(base), begin, count, static_cast<uint64_t*>(buffer));
  }
}

// Whether the last dimension is dense in all operands, and long enough to be worked on row by row where it is.
static inline bool has_dense_rows(const StridedView& view, int64_t operands) {
  const int64_t last = view.dims - 1;
  for (int64_t k = 0; k < operands; ++k)
    if (view.strides[k * view.dims + last] != 1) return false;
  return view.sizes[last] >= 256;
}

// `map_elements` of a view that has dense rows (a part of a wider tensor's columns): nothing is copied.
template <class F, int kInputs, class Kernel>
static inline void map_rows(int dtype, const StridedView& view, const void* const (&inputs)[kInputs], void* y, int threads,
                            const Kernel& kernel) {
  constexpr int64_t kPart = 16 * kBlock;  // of a row, for a thread
  const int64_t last = view.dims - 1, columns = view.sizes[last], parts = divide_up(columns, kPart);
  const int64_t rows = element_count(view) / columns;
  parallel_for(rows * parts, 1, divide_up(kGrain, smaller(kPart, columns)), threads, [&](int64_t begin, int64_t end) {
    F wide[kInputs + 1][kBlock];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / parts, first = unit % parts * kPart, limit = smaller(columns, first + kPart);
      int64_t offsets[kInputs + 1] = {}, rest = row;
      for (int64_t d = last - 1; d >= 0; --d) {
        const int64_t index = rest % view.sizes[d];
        rest /= view.sizes[d];
        for (int k = 0; k <= kInputs; ++k) offsets[k] += index * view.strides[k * view.dims + d];
      }
      for (int64_t start = first; start < limit; start += kBlock) {
        const int64_t count = smaller(kBlock, limit - start);
        const F* in[kInputs];
        for (int k = 0; k < kInputs; ++k) in[k] = widen(dtype, inputs[k], offsets[k] + start, count, wide[k]);
        const int64_t offset = offsets[kInputs] + start;
        Ahead(dtype, y, offset).fetch(0, count);
        F* out = target(dtype, y, offset, wide[kInputs]);
        kernel(row * columns + start, count, in, out);
        narrow(dtype, out, y, offset, count);
      }
    }
  });
}

// kernel(begin, count, in, y): y[i] for logical elements [begin, begin + count) from the kInputs dense arrays in[k]. Without
// a view the operands are dense in one common order, and `begin` counts in that order.
template <class F, int kInputs, class Kernel>
static inline void map_elements(int dtype, const StridedView* view, int64_t n, const void* const (&inputs)[kInputs], void* y,
                                int threads, const Kernel& kernel) {
  if (!view && in_place<F>(dtype))  // nothing to stage
    return parallel_for(n, 64, kGrain, threads, [&](int64_t begin, int64_t end) {
      const F* in[kInputs];
      for (int k = 0; k < kInputs; ++k) in[k] = static_cast<const F*>(inputs[k]) + begin;
      kernel(begin, end - begin, in, static_cast<F*>(y) + begin);
    });
  if (view && has_dense_rows(*view, kInputs + 1)) return map_rows<F, kInputs>(dtype, *view, inputs, y, threads, kernel);
  parallel_for(view ? element_count(*view) : n, kBlock, kGrain, threads, [&](int64_t begin, int64_t end) {
    F wide[kInputs + 1][kBlock], raw[kInputs + 1][kBlock];
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t count = smaller(kBlock, end - start);
      const F* in[kInputs];
      for (int k = 0; k < kInputs; ++k) {
        if (view) copy_block<true>(dtype, *view, k, const_cast<void*>(inputs[k]), start, count, raw[k]);
        in[k] = view ? widen(dtype, raw[k], 0, count, wide[k]) : widen(dtype, inputs[k], start, count, wide[k]);
      }
      void* base = view ? raw[kInputs] : y;
      F* out = target(dtype, base, view ? 0 : start, wide[kInputs]);
      if (!view) Ahead(dtype, y, start).fetch(0, count);  // to be written after the arithmetic
      kernel(start, count, in, out);
      narrow(dtype, out, base, view ? 0 : start, count);
      if (view) copy_block<false>(dtype, *view, kInputs, y, start, count, base);
    }
  });
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
