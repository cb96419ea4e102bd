#include "dream/rms_norm.h"

#include <cmath>

#include "cpu/isa.h"
#include "cpu/lanes.h"

namespace dream::DREAM_ISA {

template <class T>
static float inverse_rms(const T* x, int64_t size, float eps) {
  constexpr int kSums = 4;  // independent sums hide the latency of an addition, and round less
  floats sum[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= size; i += kSums * kLanes)
    for (int s = 0; s < kSums; ++s) {
      const floats v = load(x + i + s * kLanes);
      sum[s] += v * v;
    }
  float total = hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; i < size; ++i) total += scalar(x + i) * scalar(x + i);
  return 1.f / sqrtf(total / static_cast<float>(size) + eps);
}

template <class T>
static void norm_rows(const RmsNorm& call) {
  const T* weight = static_cast<const T*>(call.weight);
  for (int64_t r = 0; r < call.rows; ++r) {
    const T* x = static_cast<const T*>(call.x) + r * call.x_row;
    T* y = static_cast<T*>(call.y) + r * call.size;
    const float scale = inverse_rms(x, call.size, call.eps);
    int64_t i = 0;
    for (; i + kLanes <= call.size; i += kLanes) {
      floats normed = load(x + i) * scale;
      if (call.round_first) normed = rounded<T>(normed);
      store(y + i, weight ? normed * load(weight + i) : normed);
    }
    for (; i < call.size; ++i) {
      T rounded;
      store_scalar(&rounded, scalar(x + i) * scale);
      const float normed = call.round_first ? scalar(&rounded) : scalar(x + i) * scale;
      store_scalar(y + i, weight ? normed * scalar(weight + i) : normed);
    }
  }
}

int rms_norm(const RmsNorm& call) {
  call.dtype == Dtype::f32 ? norm_rows<float>(call) : norm_rows<bf16>(call);
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, rms_norm, const RmsNorm&)

void dream::rms_norm_cpu(const RmsNorm& call) { rms_norm_dispatch(call); }
#endif
