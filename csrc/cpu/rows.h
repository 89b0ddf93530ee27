// Rows of 16-bit elements without a copy in float: widened where they are read, rounded tile by tile where they are written. A
// row of float for each operand would not stay in the first-level cache.
#pragma once

#include "types.h"

namespace pyckpt {
namespace PYCKPT_ISA {

// Elements of a row as they are read: where they are, or, float16, widened into scratch before.
template <class F>
struct Plain {
  using Value = F;
  const F* x = nullptr;
  Plain() = default;
  explicit Plain(const F* row) : x(row) {}
  Plain(int dtype, const void* base, int64_t offset, int64_t n, F* scratch) : x(widen(dtype, base, offset, n, scratch)) {}
  F operator()(int64_t i) const { return x[i]; }
};
struct Bfloat16s {
  using Value = float;
  const uint16_t* x = nullptr;
  Bfloat16s() = default;
  Bfloat16s(int, const void* base, int64_t offset, int64_t, float*) : x(static_cast<const uint16_t*>(base) + offset) {}
  float operator()(int64_t i) const { return from_bits(uint32_t(x[i]) << 16); }
};

// Calls body(start, count, out) over [0, n): what it writes to out goes to `offset` + start.
template <class F, class Body>
static inline void write(int dtype, void* base, int64_t offset, int64_t n, const Body& body) {
  if (in_place<F>(dtype)) return body(int64_t(0), n, static_cast<F*>(base) + offset);
  constexpr int64_t kTile = 512;
  F tile[kTile];
  for (int64_t start = 0; start < n; start += kTile) {
    const int64_t count = smaller(kTile, n - start);
    body(start, count, tile);
    narrow(dtype, tile, base, offset + start, count);
  }
}
template <class F>
static inline void store(int dtype, const F* values, void* base, int64_t offset, int64_t n) {
  if (n <= 0) return;  // there may be no memory
  if (in_place<F>(dtype))
    __builtin_memcpy(static_cast<F*>(base) + offset, values, size_t(n) * sizeof(F));
  else
    narrow(dtype, values, base, offset, n);
}
static inline void clear(int dtype, void* base, int64_t offset, int64_t n) {
  if (n > 0) __builtin_memset(static_cast<char*>(base) + offset * item_size(dtype), 0, size_t(n * item_size(dtype)));
}

// Calls body(Type<Reader>{}).
template <class Body>
static inline void with_reader(int dtype, const Body& body) {
  if (dtype == kFloat64)
    body(Type<Plain<double>>{});
  else if (dtype == kBFloat16)
    body(Type<Bfloat16s>{});
  else
    body(Type<Plain<float>>{});
}

}  // namespace PYCKPT_ISA
}  // namespace pyckpt
