// Tensor-core products, ldmatrix and asynchronous copies.
#include "ptx.h"
#include "runtime.h"

namespace simt {
namespace {

float widened(uint16_t bits, __nv_bfloat16*) { return same_bits<float>(uint32_t(bits) << 16); }
float widened(uint16_t bits, __half*) { return __half2float(same_bits<__half>(bits)); }

}  // namespace

template <class T>
void mma_warp(void** arguments, unsigned members) {
  if (members != 0xffffffffu) return;  // reported
  float a[16][16], b[16][8], d[16][8];
  const auto low = [](uint32_t pair) { return widened(uint16_t(pair), static_cast<T*>(nullptr)); };
  const auto high = [](uint32_t pair) { return widened(uint16_t(pair >> 16), static_cast<T*>(nullptr)); };
  const auto for_each_lane = [&](auto&& visit) {
    for (int lane = 0; lane < 32; ++lane) visit(*static_cast<Mma*>(arguments[lane]), lane / 4, lane % 4 * 2);
  };
  for_each_lane([&](const Mma& mine, int g, int t) {
    for (int r = 0; r < 4; ++r) {
      float* const pair = &a[g + r % 2 * 8][t + r / 2 * 8];
      pair[0] = low(mine.a[r]);
      pair[1] = high(mine.a[r]);
    }
    for (int r = 0; r < 2; ++r) {
      b[t + r * 8][g] = low(mine.b[r]);
      b[t + r * 8 + 1][g] = high(mine.b[r]);
    }
    for (int r = 0; r < 4; ++r) d[g + r / 2 * 8][t + r % 2] = mine.d[r];
  });
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
  for_each_lane([&](const Mma& mine, int g, int t) {
    for (int r = 0; r < 4; ++r) mine.d[r] = d[g + r / 2 * 8][t + r % 2];
  });
}
template void mma_warp<__nv_bfloat16>(void**, unsigned);
template void mma_warp<__half>(void**, unsigned);

namespace {
void require_aligned(const void* address, size_t bytes, const char* what, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    report("[misaligned] %s: %s %p is not aligned to %zu bytes, at %s:%d", where().c_str(), what, address, bytes, site.file,
           site.line);
}
}  // namespace

void ldmatrix_row(const void* row, void* pc, Site site) {
  require_aligned(row, 16, "ldmatrix's row", site);
  touch(row, 16, Access::read, pc ? pc : __builtin_return_address(0));
}

template <bool transposed>
void ldmatrix_warp(void** arguments, unsigned members) {
  if (members != 0xffffffffu) return;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t m[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(m[row], static_cast<Ldmatrix*>(arguments[matrix * 8 + row])->row, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      const uint32_t first = transposed ? m[t][g] : m[g][t], second = transposed ? m[t + 1][g] : m[g][t + 1];
      static_cast<Ldmatrix*>(arguments[lane])->r[matrix] = first | second << 16;
    }
  }
}
template void ldmatrix_warp<false>(void**, unsigned);
template void ldmatrix_warp<true>(void**, unsigned);

// Copies happen as late as they may: at the wait. Until then whoever looks at the destination is reported.
void cp_async_16(void* shared, const void* global, bool valid, Site site) {
  void* const pc = __builtin_return_address(0);
  require_aligned(shared, 16, "cp.async's destination", site);
  if (valid) {
    require_aligned(global, 16, "cp.async's source", site);
    touch(global, 16, Access::read, pc);
  }
  touch(shared, 16, Access::write, pc);
  shadow::set_pending(shared, 16, true);
  fibers[current].open.push_back({static_cast<char*>(shared), static_cast<const char*>(global), valid});
}
void cp_async_commit() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}
void cp_async_wait_for(unsigned pending, Site site) {
  if (is_left_out(site)) return;
  note_passed(site);
  Fiber& fiber = fibers[current];
  while (fiber.groups.size() > pending) {
    for (const Copy& copy : fiber.groups.front()) {
      shadow::set_pending(copy.to, 16, false);
      if (copy.valid)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
      touch(copy.to, 16, Access::write, __builtin_return_address(0));
    }
    fiber.groups.pop_front();
  }
}

}  // namespace simt
