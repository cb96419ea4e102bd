#include "dream/rounded_linear.h"

#include "cpu/isa.h"
#include "cpu/lanes.h"
#include "cpu/panels.h"

// Panels as in skinny_linear.cpp: outputs lie in the lanes. One 32-bit lane holds the weights of four neighbouring inputs, and
// the same four of x are in every lane of the other operand.

namespace dream::DREAM_ISA {

constexpr int64_t kStepBytes = 4 * kPanel;

// Four products of unsigned w and signed x, in each lane, joined to the sum.
#if defined(__AVX512VNNI__)
constexpr int kWords = 1;  // of x a step: four signed bytes
DREAM_INLINE ints dot(ints sum, words w, const int32_t* x) {
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(*x));
}
#elif defined(__AVX2__)
constexpr int kWords = 2;  // inputs 0 and 2 as 16-bit integers, then 1 and 3
DREAM_INLINE ints dot(ints sum, words w, const int32_t* x) {
  const words even = w & 0x00ff00ffu, odd = (w >> 8) & 0x00ff00ffu;
#ifdef __AVX512F__
  const ints a = (ints)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(x[0]));
  return sum + a + (ints)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(x[1]));
#else
  const ints a = (ints)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(x[0]));
  return sum + a + (ints)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(x[1]));
#endif
}
#else
constexpr int kWords = 4;  // one integer each
DREAM_INLINE ints dot(ints sum, words w, const int32_t* x) {
  for (int i = 0; i < 4; ++i) sum += (ints)((w >> (8 * i)) & 0xffu) * x[i];
  return sum;
}
#endif

// Rounded rows of x.
struct Rows {
  int32_t* x;        // (rows, steps, kWords)
  float* scale;      // (rows) NaN where the row is not finite
  int32_t* surplus;  // (rows) 128 times the sum of the row's integers: what the weights' offset adds
  int64_t steps;
};

template <class T>
static void round_row(const T* x, int64_t in, int8_t* to, float& scale, int32_t& surplus) {
  floats high{}, strange{};  // NaN - NaN and inf - inf are NaN
  int64_t i = 0;
  for (; i + kLanes <= in; i += kLanes) {
    const floats v = load(x + i);
    high = vmax(v < 0.f ? -v : v, high);
    strange += v - v;
  }
  float largest = hmax(high), odd = hsum(strange);
  for (int64_t j = i; j < in; ++j) {
    const float v = scalar(x + j), size = v < 0 ? -v : v;
    largest = size > largest ? size : largest;
    odd += v - v;
  }
  surplus = 0;
  scale = odd == 0.f ? largest / 127 : __builtin_nanf("");
  // The largest value times its reciprocal may overflow where it is denormal; such a row is zero.
  const float inverse = odd == 0.f && largest > 0x1p-120f ? 127 / largest : 0.f, magic = 0x1.8p23f;
  for (int64_t j = 0; j < in; ++j) {
    const float value = inverse == 0.f ? 0.f : scalar(x + j) * inverse;
    const float nearest = (value + magic) - magic;
    to[j] = static_cast<int8_t>(nearest);
    surplus += to[j];
  }
  surplus *= 128;
}

static void spread(const int8_t* bytes, int64_t steps, int32_t* to) {
  for (int64_t k = 0; k < steps; ++k, bytes += 4) {
    if constexpr (kWords == 1) {
      memcpy(to + k, bytes, 4);
    } else if constexpr (kWords == 2) {
      to[2 * k] = (bytes[0] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(bytes[2]) << 16);
      to[2 * k + 1] = (bytes[1] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(bytes[3]) << 16);
    } else {
      for (int i = 0; i < 4; ++i) to[4 * k + i] = bytes[i];
    }
  }
}

struct Tiles {
  const RoundedLinear& call;
  Rows rows;

  // ROWS rows from `row` on times PANELS panels from `panel` on.
  template <int ROWS, int PANELS>
  void tile(int64_t row, int64_t panel) const;
};

template <int ROWS, int PANELS>
void Tiles::tile(int64_t row, int64_t panel) const {
  const uint8_t* packed = call.packed + panel * rows.steps * kStepBytes;
  const int32_t* x = rows.x + row * rows.steps * kWords;
  ints sum[ROWS][PANELS][kVecs] = {};
  for (int64_t k = 0; k < rows.steps; ++k) {
    words weight[PANELS][kVecs];
    for (int p = 0; p < PANELS; ++p) {
      const uint8_t* at = packed + (p * rows.steps + k) * kStepBytes;
      __builtin_prefetch(at + kAhead);
      memcpy(weight[p], at, kStepBytes);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p)
        for (int v = 0; v < kVecs; ++v) sum[r][p][v] = dot(sum[r][p][v], weight[p][v], x + (r * rows.steps + k) * kWords);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) {
      float sums[kPanel];
      for (int v = 0; v < kVecs; ++v)
        store(sums + v * kLanes, __builtin_convertvector(sum[r][p][v] - rows.surplus[row + r], floats) * rows.scale[row + r]);
      const int64_t first = (panel + p) * kPanel;
      for (int64_t i = 0; i < kPanel && first + i < call.out; ++i) sums[i] *= call.scale[first + i];
      write_row(sums, call, row + r, first);
    }
}

int rounded_linear(const RoundedLinear& call) {
  const int64_t steps = (call.in + 3) / 4;
  Room<int32_t> x(call.rows * steps * kWords), surplus(call.rows);
  Room<float> scale(call.rows);
  Room<int8_t> bytes(4 * steps);
  const Rows rows{x.data, scale.data, surplus.data, steps};
  memset(bytes.data, 0, 4 * steps);
  for (int64_t r = 0; r < call.rows; ++r) {
    if (call.dtype == Dtype::f32)
      round_row(static_cast<const float*>(call.x) + r * call.x_row, call.in, bytes.data, scale.data[r], surplus.data[r]);
    else
      round_row(static_cast<const bf16*>(call.x) + r * call.x_row, call.in, bytes.data, scale.data[r], surplus.data[r]);
    spread(bytes.data, steps, x.data + r * steps * kWords);
  }
  all_tiles(Tiles{call, rows}, call.rows, call.out, call.threads);
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, rounded_linear, const RoundedLinear&)

void dream::rounded_linear_cpu(const RoundedLinear& call) {
  if (call.rows > 0 && call.out > 0) rounded_linear_dispatch(call);
}
#endif
