// What kernels need beyond CUDA C++: launches, shared memory, and the instructions that have no intrinsic. The only file that
// knows whether nvcc or the host's compiler (csrc/simt, for tests) reads the kernels; each instruction stands beside its
// emulation.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#define SIMT_SHARED(T, name, count) __shared__ T name[count]
#define SIMT_DYN_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define SIMT_CALLER
#define SIMT_AND_CALLER
#else
#include "simt/simt.h"
#define SIMT_AND_CALLER , SIMT_CALLER
#endif

namespace dream {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Copies 16 bytes to shared memory in the background; writes zeros when `valid` is false (`global` is then not read, but has to
// be an address in the buffer). Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid SIMT_AND_CALLER) {
#ifdef __CUDACC__
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
#else
  simt::copy_async(shared, global, 16, valid ? 16 : 0, caller);
#endif
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void copy_async_commit(SIMT_CALLER) {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  simt::copy_async_commit(caller);
#endif
}

// Waits until at most `Pending` of this thread's groups are under way. Other threads see the bytes after a barrier.
template <int Pending>
__device__ __forceinline__ void copy_async_wait(SIMT_CALLER) {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#else
  simt::copy_async_wait(Pending, caller);
#endif
}

// Four 8 x 8 matrices of 16-bit elements. Lane 8 i + r gives the address of row r of matrix i; lane 4 r + c receives elements
// 2 c and 2 c + 1 of row r of every matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row SIMT_AND_CALLER) {
#ifdef __CUDACC__
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
#else
  simt::load_matrices(r, row, 4, false, caller);
#endif
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row SIMT_AND_CALLER) {
#ifdef __CUDACC__
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
#else
  simt::load_matrices(r, row, 4, true, caller);
#endif
}

// d (16 x 8, fp32) += a (16 x 16) b (16 x 8). With g = lane / 4 and t = lane % 4: a[i] holds row g + 8 (i % 2), columns
// 2 t + 8 (i / 2) and the next; b0 and b1 hold column g, rows 2 t (+ 8) and the next; d[i] is row g + 8 (i / 2), column 2 t + i % 2.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             __nv_bfloat16 SIMT_AND_CALLER) {
#ifdef __CUDACC__
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  simt::multiply_add(d, a, b0, b1, false, caller);
#endif
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half SIMT_AND_CALLER) {
#ifdef __CUDACC__
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  simt::multiply_add(d, a, b0, b1, true, caller);
#endif
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16(x); }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half(x); }

// 2^x, a unit or two in the last place off; exp2_fast(-inf) is 0.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

}  // namespace dream
