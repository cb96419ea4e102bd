// The fp32 lanes of one register of the instruction set. Only for files compiled per instruction set (see isa.h).
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifndef DREAM_ISA
#error "lanes.h is for files compiled per instruction set"
#endif
#define DREAM_INLINE static inline __attribute__((always_inline))

namespace dream::DREAM_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t halves __attribute__((vector_size(2 * kLanes)));
struct bf16 { uint16_t bits; };

constexpr float kNegInf = -__builtin_inff();

DREAM_INLINE floats load(const float* p) { floats x; memcpy(&x, p, sizeof x); return x; }
DREAM_INLINE floats load(const bf16* p) {
  halves x;
  memcpy(&x, p, sizeof x);
  return (floats)(__builtin_convertvector(x, words) << 16);
}
DREAM_INLINE float scalar(const float* p) { return *p; }
DREAM_INLINE float scalar(const bf16* p) {
  const uint32_t wide = uint32_t{p->bits} << 16;
  float x;
  memcpy(&x, &wide, sizeof x);
  return x;
}
DREAM_INLINE void store(float* p, floats x) { memcpy(p, &x, sizeof x); }
DREAM_INLINE void store_scalar(float* p, float x) { *p = x; }
DREAM_INLINE void store_scalar(bf16* p, float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  p->bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
DREAM_INLINE void store(bf16* p, floats x) {  // rounds as store_scalar does
  const words bits = (words)x, even = bits + 0x7fff + ((bits >> 16) & 1), nan = (bits >> 16) | 0x40;
  const halves top = __builtin_convertvector((x == x ? even >> 16 : nan), halves);
  memcpy(p, &top, sizeof top);
}
// x as it is after a trip through memory of type T.
template <class T>
DREAM_INLINE floats rounded(floats x) {
  if constexpr (sizeof(T) < sizeof(float)) {
    T memory[kLanes];
    store(memory, x);
    x = load(memory);
  }
  return x;
}
DREAM_INLINE floats broadcast(float x) { return x - floats{}; }
DREAM_INLINE floats vmax(floats a, floats b) { return a > b ? a : b; }
DREAM_INLINE ints lane_ids() {
  ints x;
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

DREAM_INLINE bool any(ints mask) {  // of a comparison: lanes of 0 or -1
  uint64_t word[sizeof mask / 8], all = 0;
  memcpy(word, &mask, sizeof mask);
  for (uint64_t w : word) all |= w;
  return all != 0;
}

template <class Op>
DREAM_INLINE float reduce(floats x, Op op) {  // a fixed binary tree
  float lane[kLanes];
  store(lane, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = op(lane[i], lane[i + width]);
  return lane[0];
}
DREAM_INLINE float hmax(floats x) { return reduce(x, [](float a, float b) { return a > b ? a : b; }); }
DREAM_INLINE float hsum(floats x) { return reduce(x, [](float a, float b) { return a + b; }); }

// e^x = (1 + grown) power for x <= 0. x = n ln 2 + r, |r| <= ln(2)/2; the Taylor series to r^7 leaves a relative error of
// r^8/8! < 6e-9. Below -87 the result, less than 2^-125, becomes 0. ln 2 is split so that n * hi is exact.
struct Exponential {
  floats r, series, power;  // grown = r series
};
DREAM_INLINE Exponential exponential(floats x) {
  const float hi = 0x1.62e4p-1f, lo = 0x1.7f7d1cp-20f, round = 0x1.8p23f;
  const floats n = (x * 0x1.715476p0f + round) - round;
  const floats r = (x - n * hi) - n * lo;
  floats p = r * (1.f / 5040) + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  const floats bounded = x < -87.f ? floats{} : n;  // keeps the conversion to int defined
  const floats power = (floats)((__builtin_convertvector(bounded, ints) + 127) << 23);
  return {r, p, power};
}
DREAM_INLINE floats vexp(floats x) {
  const Exponential e = exponential(x);
  return x < -87.f ? floats{} : (e.series * e.r + 1.f) * e.power;
}
// e^x - 1 for x <= 0, without the cancellation near zero.
DREAM_INLINE floats vexpm1(floats x) {
  const Exponential e = exponential(x);
  return x < -87.f ? broadcast(-1.f) : e.series * e.r * e.power + (e.power - 1.f);
}

// Cache-line aligned, and not a byte more than asked for: a sanitizer sees what is touched behind it.
DREAM_INLINE void* aligned_memory(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes)) throw std::bad_alloc();
  return memory;
}

template <class T>
struct Room {  // cache-line aligned elements, not initialised
  T* data;
  explicit Room(int64_t count) { data = static_cast<T*>(aligned_memory(static_cast<size_t>(count > 0 ? count : 1) * sizeof(T))); }
  ~Room() { free(data); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
};

struct Scratch : Room<float> {  // zeroed
  explicit Scratch(int64_t count) : Room(count) { memset(data, 0, static_cast<size_t>(count > 0 ? count : 1) * sizeof(float)); }
};

}  // namespace dream::DREAM_ISA
