// ptx.h for a host compiler. Sums of mma are in float, one product after the other; a GPU's order is not specified.
#pragma once

namespace simt {

struct Mma {
  float* d;
  const uint32_t *a, *b;
};
template <class T>
void mma_warp(void** arguments, unsigned members);
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_SITE) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>, "bf16 or fp16");
  Mma mine{d, a, b};
  collective(0xffffffffu, Collective::mma, &mine, mma_warp<T>, true, site);
}

void ldmatrix_row(const void* row, void* pc, Site site);  // checks one lane's address
struct Ldmatrix {
  uint32_t* r;
  const void* row;
};
template <bool transposed>
void ldmatrix_warp(void** arguments, unsigned members);
template <bool transposed = false>
void ldmatrix_x4(uint32_t (&r)[4], const void* row, SIMT_SITE) {
  ldmatrix_row(row, nullptr, site);
  Ldmatrix mine{r, row};
  collective(0xffffffffu, Collective::ldmatrix, &mine, ldmatrix_warp<transposed>, true, site);
}

void cp_async_16(void* shared, const void* global, bool valid = true, SIMT_SITE);
void cp_async_commit();
void cp_async_wait_for(unsigned pending, Site site);
template <int pending>
void cp_async_wait(SIMT_SITE) {
  cp_async_wait_for(pending, site);
}

inline float power_of_two(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

}  // namespace simt
