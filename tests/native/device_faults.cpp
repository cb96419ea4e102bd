// Kernels with one fault each, which the emulator or a sanitizer must report, or a wrong value show. fault=none has none.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>

#include "cuda/simt.cuh"
#include "device_cases.h"

namespace device_check {

using dream::kAllLanes;
using dream::kWarp;

constexpr int kThreads = 64;  // of each block

struct Faulty {
  float* out;       // kThreads floats, zeros
  const float* in;  // 4 kThreads floats
  int known;        // kThreads, which the compiler does not know
};

// ---- memory

__global__ void none(Faulty x) {
  SIMT_SHARED(float, shared, kThreads);
  shared[threadIdx.x] = 1.f;
  __syncthreads();
  x.out[threadIdx.x] = shared[threadIdx.x ^ 1];
}
__global__ void shared_overflow(Faulty x) {
  SIMT_SHARED(float, shared, kThreads);
  shared[threadIdx.x + x.known / kThreads] = 1.f;
  __syncthreads();
  x.out[threadIdx.x] = 1.f;
}
__global__ void dynamic_shared_overflow(Faulty x) {
  SIMT_DYN_SHARED(bytes);
  reinterpret_cast<float*>(bytes)[threadIdx.x] = 1.f;
  x.out[threadIdx.x] = 1.f;
}
__global__ void out_of_bounds(Faulty x) { x.out[static_cast<int>(threadIdx.x) - x.known / kThreads] = 1.f; }
__global__ void misaligned(Faulty x) { x.out[threadIdx.x] = reinterpret_cast<const float4*>(x.in + 1 + 2 * (threadIdx.x / 2))->x; }
__global__ void uninitialised_local(Faulty x) {
  float value;
  if (static_cast<int>(threadIdx.x) < x.known - 4) value = 1.f;
  x.out[threadIdx.x] = value;
}
__global__ void uninitialised_shared(Faulty x) {
  SIMT_SHARED(float, shared, kThreads);
  if (static_cast<int>(threadIdx.x) < x.known - 4) shared[threadIdx.x] = 1.f;
  x.out[threadIdx.x] = shared[threadIdx.x];
}

// ---- synchronisation

__global__ void divergent_barrier(Faulty x) {
  if (threadIdx.x < kWarp) {
    __syncthreads();
    x.out[threadIdx.x] = 1.f;
  } else {
    x.out[threadIdx.x] = 1.f;
    __syncthreads();
  }
}
__global__ void barrier_after_exit(Faulty x) {
  x.out[threadIdx.x] = 1.f;
  if (threadIdx.x >= 40) return;
  __syncthreads();
}
__global__ void partial_shuffle(Faulty x) {
  float value = 1.f;
  if (threadIdx.x % kWarp < 16) value = __shfl_xor_sync(kAllLanes, value, 1);
  x.out[threadIdx.x] = value;
}
__global__ void shuffle_after_exit(Faulty x) {
  x.out[threadIdx.x] = 1.f;
  if (threadIdx.x % kWarp >= 8) return;
  x.out[threadIdx.x] = __shfl_down_sync(kAllLanes, 1.f, 1);
}
__global__ void missing_barrier(Faulty x) {  // right in every order that runs a warp's lanes together
  SIMT_SHARED(float, shared, kThreads);
  shared[threadIdx.x] = 1.f;
  __syncwarp();
  x.out[threadIdx.x] = shared[threadIdx.x ^ kWarp];
}
__global__ void missing_syncwarp(Faulty x) {
  SIMT_SHARED(float, shared, kThreads);
  shared[threadIdx.x] = 1.f;
  x.out[threadIdx.x] = shared[threadIdx.x ^ 1];
}
__global__ void missing_second_barrier(Faulty x) {  // the next turn overwrites what others still read
  SIMT_SHARED(float, shared, kThreads);
  float sum = 0.f;
  for (int turn = 0; turn < 2; ++turn) {
    shared[threadIdx.x] = static_cast<float>(turn);
    __syncthreads();
    sum += shared[threadIdx.x ^ 1];
  }
  x.out[threadIdx.x] = sum;
}
__global__ void racy_histogram(Faulty x) {
  x.out[threadIdx.x] = 1.f;
  if (threadIdx.x % 2 == 0) x.out[0] += 0.f;
}
__global__ void racy_blocks(Faulty x) { x.out[threadIdx.x] = 1.f; }
__global__ void missing_copy_wait(Faulty x) {
  SIMT_SHARED(float4, shared, kThreads);
  dream::copy_async_16(&shared[threadIdx.x], x.in + 4 * threadIdx.x, true);
  dream::copy_async_commit();
  __syncthreads();
  x.out[threadIdx.x] = shared[threadIdx.x].x;
}
__global__ void missing_copy_barrier(Faulty x) {  // a thread's wait says nothing of another's copies
  SIMT_SHARED(float4, shared, kThreads);
  dream::copy_async_16(&shared[threadIdx.x], x.in + 4 * threadIdx.x, true);
  dream::copy_async_commit();
  dream::copy_async_wait<0>();
  x.out[threadIdx.x] = shared[threadIdx.x ^ 1].x;
}

// ---- launches

__global__ void too_much_shared(Faulty x) { x.out[threadIdx.x] = 1.f; }
__global__ void more_than_prepared(Faulty x) { x.out[threadIdx.x] = 1.f; }
__global__ void never_prepared(Faulty x) { x.out[threadIdx.x] = 1.f; }

struct Fault {
  const char* name;
  void (*kernel)(Faulty);
  size_t shared_bytes, prepared_bytes;
  unsigned blocks;
};

#define FAULT(name) {#name, name, 0, 0, 1}
static const Fault kFaults[] = {
    FAULT(none), FAULT(shared_overflow), {"dynamic_shared_overflow", dynamic_shared_overflow, 4 * kThreads - 4, 0, 1},
    FAULT(out_of_bounds), FAULT(misaligned), FAULT(uninitialised_local), FAULT(uninitialised_shared), FAULT(divergent_barrier),
    FAULT(barrier_after_exit), FAULT(partial_shuffle), FAULT(shuffle_after_exit), FAULT(missing_barrier), FAULT(missing_syncwarp),
    FAULT(missing_second_barrier), FAULT(racy_histogram), {"racy_blocks", racy_blocks, 0, 0, 2}, FAULT(missing_copy_wait),
    FAULT(missing_copy_barrier), {"too_much_shared", too_much_shared, 300 << 10, 300 << 10, 1},
    {"more_than_prepared", more_than_prepared, 100 << 10, 64 << 10, 1}, {"never_prepared", never_prepared, 0, 0, 1}};
#undef FAULT

int run_fault(const char* name) {
  for (const Fault& fault : kFaults) {
    if (std::strcmp(name, fault.name)) continue;
    const std::unique_ptr<float[]> out(new float[kThreads]()), in(new float[4 * kThreads]);
    std::fill(in.get(), in.get() + 4 * kThreads, 1.f);
    if (fault.kernel != never_prepared) simt::prepare(reinterpret_cast<const void*>(fault.kernel), fault.prepared_bytes);
    SIMT_LAUNCH(fault.kernel, dim3(fault.blocks), dim3(kThreads), fault.shared_bytes, nullptr, Faulty{out.get(), in.get(), kThreads});
    for (int i = 0; i < kThreads; ++i)
      if (out[i] != 1.f) return std::fprintf(stderr, "%s: a wrong value, %g\n", name, static_cast<double>(out[i])), 1;
    return 0;
  }
  return std::fprintf(stderr, "device: no fault %s\n", name), 2;
}

}  // namespace device_check
