// Instructions that CUDA C++ has no function for: tensor cores, ldmatrix, asynchronous copies, powers of two. The only inline
// assembly.
//
// Matrix fragments are laid out as in the PTX manual, "Matrix Fragments for mma.m16n8k16": with g = lane / 4, t = lane % 4 * 2,
//   a[0] = A[g][t, t+1]   a[1] = A[g+8][t, t+1]   a[2] = A[g][t+8, t+9]   a[3] = A[g+8][t+8, t+9]
//   b[0] = B[t, t+1][g]   b[1] = B[t+8, t+9][g]   d[0, 1] = D[g][t, t+1]  d[2, 3] = D[g+8][t, t+1]
// All 32 lanes of a warp take part in mma and ldmatrix.
#pragma once

#include "simt.h"

#if defined(PYCKPT_SIMT_EMULATED)
#include "emulated_ptx.h"
#else

namespace simt {

// D = A (16 x 16) B (16 x 8) + D with sums in float.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(sizeof(T) == 2, "bf16 or fp16");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, __half>, "bf16 or fp16");
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane i gives the address, aligned to 16 bytes, of row i % 8 of
// matrix i / 8, and gets elements [g][t, t+1] of each; of its transpose if `transposed`.
template <bool transposed = false>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Copies 16 aligned bytes from global to shared memory, or fills them with zeros unless `valid`. They are there for this
// thread after cp_async_wait, for others after a barrier that follows it.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `pending` of this thread's last groups are under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// 2^x within 2 ulp; less than 2^-126 is 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace simt

#endif
