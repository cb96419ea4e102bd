#include "dream/skinny_linear.h"

#include "cpu/isa.h"
#include "cpu/lanes.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// A few rows times a large matrix is bound by reading the matrix. Packed panels are read once, in order, for up to eight
// rows, and the outputs of a panel lie in the lanes, so that no sum crosses lanes.

namespace dream::DREAM_ISA {

constexpr int kVecs = static_cast<int>(kPanel) / kLanes;  // registers of a panel
#if defined(__AVX512F__)
constexpr int kGroup = 3, kRows = 8;  // panels and rows of a tile: 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kGroup = 1, kRows = 4;  // 8 of 16
#else
constexpr int kGroup = 1, kRows = 2;  // 8 of 16
#endif
constexpr int64_t kRun = 64;      // steps summed before they join the total: a sum of sums has a smaller rounding error
constexpr int64_t kAhead = 1024;  // bytes: far enough for the prefetch to arrive in time


// How one step along the inputs is done: its stride in the panel, and acc += weights * x.
struct StepF32 {
  typedef float T;
  static constexpr int64_t kInputs = 1;
  floats weight[kVecs];
  DREAM_INLINE StepF32 read(const float* panel) {
    StepF32 step;
    for (int v = 0; v < kVecs; ++v) step.weight[v] = load(panel + v * kLanes);
    return step;
  }
  DREAM_INLINE float pick(const float* x) { return *x; }
  DREAM_INLINE float pick_last(const float* x) { return *x; }
  __attribute__((always_inline)) void add(floats* sum, float x) const {
    for (int v = 0; v < kVecs; ++v) sum[v] += weight[v] * x;
  }
};

struct StepBf16 {
  typedef bf16 T;
  static constexpr int64_t kInputs = 2;
  words weight[kVecs];
  DREAM_INLINE StepBf16 read(const bf16* panel) {
    StepBf16 step;
    for (int v = 0; v < kVecs; ++v) memcpy(&step.weight[v], panel + 2 * v * kLanes, sizeof(words));
    return step;
  }
  DREAM_INLINE uint32_t pick(const bf16* x) {
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return pair;
  }
  DREAM_INLINE uint32_t pick_last(const bf16* x) { return x->bits; }  // beside it lies a zero
  __attribute__((always_inline)) void add(floats* sum, uint32_t pair) const {
#ifdef __AVX512BF16__
    sum[0] = (floats)_mm512_dpbf16_ps((__m512)sum[0], (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)), (__m512bh)weight[0]);
#else
    const uint32_t low = pair << 16, high = pair & 0xffff0000u;
    float x0, x1;
    memcpy(&x0, &low, sizeof x0);
    memcpy(&x1, &high, sizeof x1);
    for (int v = 0; v < kVecs; ++v) {
      sum[v] += (floats)(weight[v] << 16) * x0;
      sum[v] += (floats)(weight[v] & 0xffff0000u) * x1;
    }
#endif
  }
};

template <class T>
static void write_row(const float* sums, const SkinnyLinear& call, int64_t row, int64_t first, int64_t count) {
  const T* bias = static_cast<const T*>(call.bias);
  T* y = static_cast<T*>(call.y) + row * call.out + first;
  for (int64_t i = 0; i < count; ++i) store_scalar(y + i, bias ? sums[i] + scalar(bias + first + i) : sums[i]);
}

// ROWS rows from `row` on times PANELS panels from `panel` on.
template <class Step, int ROWS, int PANELS>
static void tile(const SkinnyLinear& call, int64_t row, int64_t panel) {
  typedef typename Step::T T;
  constexpr int64_t kStride = kPanel * Step::kInputs;
  const int64_t steps = (call.in + Step::kInputs - 1) / Step::kInputs, whole = call.in / Step::kInputs;
  const T* packed = static_cast<const T*>(call.packed) + panel * steps * kStride;
  const T* x = static_cast<const T*>(call.x) + row * call.x_row;
  floats total[ROWS][PANELS][kVecs] = {};
  for (int64_t begin = 0; begin < steps; begin += kRun) {
    const int64_t end = begin + kRun < whole ? begin + kRun : whole;
    floats sum[ROWS][PANELS][kVecs] = {};
    for (int64_t k = begin; k < end; ++k) {
      Step step[PANELS];
      for (int p = 0; p < PANELS; ++p) {
        const T* at = packed + (p * steps + k) * kStride;
        __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead);
        step[p] = Step::read(at);
      }
      for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) step[p].add(sum[r][p], Step::pick(x + r * call.x_row + k * Step::kInputs));
    }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p)
        for (int v = 0; v < kVecs; ++v) total[r][p][v] += sum[r][p][v];
  }
  if (whole < steps)
    for (int p = 0; p < PANELS; ++p)
      for (int r = 0; r < ROWS; ++r)
        Step::read(packed + (p * steps + whole) * kStride).add(total[r][p], Step::pick_last(x + r * call.x_row + call.in - 1));
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) {
      float sums[kPanel];
      for (int v = 0; v < kVecs; ++v) store(sums + v * kLanes, total[r][p][v]);
      const int64_t first = (panel + p) * kPanel, left = call.out - first;
      write_row<T>(sums, call, row + r, first, left < kPanel ? left : kPanel);
    }
}

// The last, incomplete tile of `count` rows.
template <class Step, int PANELS, int ROWS = kRows - 1>
static void rest(const SkinnyLinear& call, int64_t row, int64_t count, int64_t panel) {
  if constexpr (ROWS > 0) {
    if (count == ROWS) return tile<Step, ROWS, PANELS>(call, row, panel);
    rest<Step, PANELS, ROWS - 1>(call, row, count, panel);
  }
}

template <class Step, int PANELS>
static void all_rows(const SkinnyLinear& call, int64_t panel) {
  int64_t row = 0;
  for (; row + kRows <= call.rows; row += kRows) tile<Step, kRows, PANELS>(call, row, panel);
  rest<Step, PANELS>(call, row, call.rows - row, panel);
}

template <class Step>
static void run(const SkinnyLinear& call) {
  const int64_t panels = (call.out + kPanel - 1) / kPanel, groups = (panels + kGroup - 1) / kGroup;
#pragma omp parallel for num_threads(call.threads) schedule(static) if (call.threads > 1)
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t panel = g * kGroup, left = panels - panel;
    if (left >= kGroup) {
      all_rows<Step, kGroup>(call, panel);
    } else {
      for (int64_t p = 0; p < left; ++p) all_rows<Step, 1>(call, panel + p);
    }
  }
}

int skinny_linear(const SkinnyLinear& call) {
  call.dtype == Dtype::f32 ? run<StepF32>(call) : run<StepBf16>(call);
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, skinny_linear, const SkinnyLinear&)

namespace dream {

static int64_t inputs_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 1; }

int64_t packed_elements(Dtype dtype, int64_t out, int64_t in) {
  const int64_t unit = inputs_of(dtype);
  return (out + kPanel - 1) / kPanel * kPanel * ((in + unit - 1) / unit * unit);
}

// visit(place in the matrix, or -1 for padding; place in the packed form), in the packed form's order.
template <class Visit>
static void each_element(const PackLinear& call, Visit visit) {
  const int64_t unit = inputs_of(call.dtype), steps = (call.in + unit - 1) / unit, panels = (call.out + kPanel - 1) / kPanel;
  int64_t at = 0;
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t s = 0; s < steps; ++s)
      for (int64_t lane = 0; lane < kPanel; ++lane)
        for (int64_t u = 0; u < unit; ++u, ++at) {
          const int64_t o = p * kPanel + lane, i = s * unit + u;
          visit(o < call.out && i < call.in ? o * call.in + i : -1, at);
        }
}

template <class T>
static void pack(const PackLinear& call) {
  const T* weight = static_cast<const T*>(call.weight);
  T* packed = static_cast<T*>(call.packed);
  each_element(call, [&](int64_t from, int64_t to) { packed[to] = from < 0 ? T{} : weight[from]; });
}

template <class T>
static void unpack(const PackLinear& call) {
  T* weight = static_cast<T*>(call.weight);
  const T* packed = static_cast<const T*>(call.packed);
  each_element(call, [&](int64_t to, int64_t from) {
    if (to >= 0) weight[to] = packed[from];
  });
}

void pack_linear_cpu(const PackLinear& call) {
  call.dtype == Dtype::f32 ? pack<uint32_t>(call) : pack<uint16_t>(call);  // bits are moved, never numbers
}
void unpack_linear_cpu(const PackLinear& call) { call.dtype == Dtype::f32 ? unpack<uint32_t>(call) : unpack<uint16_t>(call); }
void skinny_linear_cpu(const SkinnyLinear& call) {
  if (call.rows > 0 && call.out > 0) skinny_linear_dispatch(call);
}

}  // namespace dream
#endif
