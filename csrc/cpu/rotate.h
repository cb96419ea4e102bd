// Rotary positions as a chain of torch operators rounds them. For files compiled without fused multiply-adds: they would skip a
// rounding in fp32.
#pragma once
#include "cpu/lanes.h"

namespace dream::DREAM_ISA {

// One head of one row in the half-split layout: x * cos + half-turned x * sin, each product and the sum rounded.
template <class T>
static void rotate(const T* x, const T* cos, const T* sin, int64_t head_dim, T* y) {
  const int64_t half = head_dim / 2;
  int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const floats low = load(x + d), high = load(x + half + d);
    const floats a = rounded<T>(low * load(cos + d)), b = rounded<T>(high * load(sin + d));
    const floats c = rounded<T>(high * load(cos + half + d)), e = rounded<T>(low * load(sin + half + d));
    store(y + d, a - b);
    store(y + half + d, c + e);
  }
  const auto round = [](float value) {
    T memory;
    store_scalar(&memory, value);
    return scalar(&memory);
  };
  for (; d < half; ++d) {
    const float low = scalar(x + d), high = scalar(x + half + d);
    const float a = round(low * scalar(cos + d)), b = round(high * scalar(sin + d));
    const float c = round(high * scalar(cos + half + d)), e = round(low * scalar(sin + half + d));
    store_scalar(y + d, a - b);
    store_scalar(y + half + d, c + e);
  }
}

}  // namespace dream::DREAM_ISA
