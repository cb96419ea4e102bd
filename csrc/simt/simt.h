// CUDA C++ for the host's compiler: what kernels see in place of cuda_runtime.h. Only what some kernel needs, or may soon.
// A call of anything else does not compile, which is better than an emulation that nobody checked.
#pragma once
#include <cuda_bf16.h>  // types, rounding and conversions of the host half of these headers are NVIDIA's own
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "simt/runtime.h"

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __grid_constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// It would become a variable of each thread.
#define __shared__ static_assert(false, "use SIMT_SHARED or SIMT_DYN_SHARED");

#define SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), simt::launch(kernel, grid, block, shared_bytes, {__FILE__, __LINE__}, __VA_ARGS__))
#define SIMT_SHARED(T, name, count) \
  static char name##_key;           \
  T(&name)[count] = *static_cast<T(*)[count]>(simt::shared_static(&name##_key, sizeof(T) * (count)))
#define SIMT_DYN_SHARED(name) unsigned char* name = static_cast<unsigned char*>(simt::shared_dynamic())

constexpr int warpSize = 32;

// ---- synchronisation
inline void __syncthreads(SIMT_CALLER) { simt::block_barrier(0, caller); }
inline int __syncthreads_and(int predicate, SIMT_CALLER) { return simt::block_barrier(predicate, caller).all; }
inline int __syncthreads_or(int predicate, SIMT_CALLER) { return simt::block_barrier(predicate, caller).any; }
inline int __syncthreads_count(int predicate, SIMT_CALLER) { return simt::block_barrier(predicate, caller).count; }
inline void __syncwarp(unsigned mask = ~0u, SIMT_CALLER) { simt::warp_barrier(mask, caller); }

// ---- collectives of a warp
namespace simt {
template <class T>
T shuffle(Shuffle mode, unsigned mask, T value, int source, int width, Caller caller) {
  static_assert((sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8) && std::is_trivially_copyable<T>::value, "CUDA shuffles no such type");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle(mode, mask, bits, source, width, caller);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_CALLER) {
  return simt::shuffle(simt::Shuffle::index, mask, value, source, width, caller);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_CALLER) {
  return simt::shuffle(simt::Shuffle::up, mask, value, static_cast<int>(delta), width, caller);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_CALLER) {
  return simt::shuffle(simt::Shuffle::down, mask, value, static_cast<int>(delta), width, caller);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_CALLER) {
  return simt::shuffle(simt::Shuffle::butterfly, mask, value, bits, width, caller);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_CALLER) { return simt::ballot(mask, predicate != 0, caller); }
inline int __any_sync(unsigned mask, int predicate, SIMT_CALLER) { return simt::ballot(mask, predicate != 0, caller) != 0; }
inline int __all_sync(unsigned mask, int predicate, SIMT_CALLER) { return simt::ballot(mask, predicate != 0, caller) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_CALLER) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA matches no such type");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return simt::match_any(mask, bits, caller);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, SIMT_CALLER) {
  return simt::reduce(simt::Reduction::add, mask, value, caller);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, SIMT_CALLER) {
  return simt::reduce(simt::Reduction::bit_and, mask, value, caller);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, SIMT_CALLER) {
  return simt::reduce(simt::Reduction::bit_or, mask, value, caller);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, SIMT_CALLER) {
  return simt::reduce(simt::Reduction::bit_xor, mask, value, caller);
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, SIMT_CALLER) {
  static_assert(std::is_same<T, int>::value || std::is_same<T, unsigned>::value, "CUDA reduces no such type");
  const auto operation = std::is_signed<T>::value ? simt::Reduction::min_signed : simt::Reduction::min_unsigned;
  return static_cast<T>(simt::reduce(operation, mask, static_cast<uint32_t>(value), caller));
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, SIMT_CALLER) {
  static_assert(std::is_same<T, int>::value || std::is_same<T, unsigned>::value, "CUDA reduces no such type");
  const auto operation = std::is_signed<T>::value ? simt::Reduction::max_signed : simt::Reduction::max_unsigned;
  return static_cast<T>(simt::reduce(operation, mask, static_cast<uint32_t>(value), caller));
}

// ---- tensor cores
namespace simt {
// Lanes below 8 `count` give the address of a row of 16 bytes. The row is read here, where the sanitizers look.
inline void load_matrices(uint32_t* registers, const void* row, int count, bool transposed, Caller caller) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail(caller, "ldmatrix: %p is not a multiple of 16", row);
  unsigned char bytes[16] = {};
  for (int i = 0; lane() < 8 * count && i < 16; ++i) bytes[i] = static_cast<const unsigned char*>(row)[i];
  distribute_matrices(registers, bytes, count, transposed, caller);
}
}  // namespace simt

// ---- atomics, relaxed: they order nothing else
namespace simt {
template <class T>
struct Same {
  using type = T;
};
template <class T>
using Exactly = typename Same<T>::type;  // not deduced from this argument

template <class T, class Function>
T update(T* at, Function next) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA has no such atomic");
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  auto* const word = reinterpret_cast<Word*>(at);
  Word old = __atomic_load_n(word, __ATOMIC_RELAXED), wanted;
  T before;
  do {
    std::memcpy(&before, &old, sizeof old);
    const T after = next(before);
    std::memcpy(&wanted, &after, sizeof after);
  } while (!__atomic_compare_exchange_n(word, &old, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
}  // namespace simt

template <class T>
T atomicAdd(T* at, simt::Exactly<T> value) {
  static_assert(std::is_integral<T>::value, "a sum of floats depends on the order of the threads");
  return simt::update(at, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMax(T* at, simt::Exactly<T> value) {
  return simt::update(at, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* at, simt::Exactly<T> value) {
  return simt::update(at, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicOr(T* at, simt::Exactly<T> value) {
  return simt::update(at, [=](T old) { return old | value; });
}
template <class T>
T atomicAnd(T* at, simt::Exactly<T> value) {
  return simt::update(at, [=](T old) { return old & value; });
}
template <class T>
T atomicExch(T* at, simt::Exactly<T> value) {
  return simt::update(at, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* at, simt::Exactly<T> expected, simt::Exactly<T> value) {
  return simt::update(at, [=](T old) { return old == expected ? value : old; });
}

// ---- functions of one thread
template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcs(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
void __stcs(T* at, simt::Exactly<T> value) { *at = value; }
template <class T>
void __stcg(T* at, simt::Exactly<T> value) { *at = value; }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}

namespace simt {
template <class To, class From>
To bits_of(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "");
  std::memcpy(&y, &x, sizeof y);
  return y;
}
}  // namespace simt
inline float __int_as_float(int x) { return simt::bits_of<float>(x); }
inline int __float_as_int(float x) { return simt::bits_of<int>(x); }
inline float __uint_as_float(unsigned x) { return simt::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return simt::bits_of<unsigned>(x); }

template <class T>
T min(T a, simt::Exactly<T> b) { return b < a ? b : a; }
template <class T>
T max(T a, simt::Exactly<T> b) { return a < b ? b : a; }
