#include "dream/skinny_linear.h"

#include "cpu/isa.h"
#include "cpu/lanes.h"
#include "cpu/panels.h"

// A few rows times a large matrix is bound by reading the matrix. Packed panels are read once, in order, for up to eight
// rows, and the outputs of a panel lie in the lanes, so that no sum crosses lanes.

namespace dream::DREAM_ISA {

constexpr int64_t kRun = 64;      // steps summed before they join the total: a sum of sums has a smaller rounding error

// How one step along the inputs reads a panel, and adds weights * x. bf16 weights are widened: on the processors with bf16
// products that we could measure, those have half the throughput of fp32 multiply-adds.
struct StepF32 {
  typedef float T;
  static constexpr int64_t kInputs = 1;
  floats weight[kVecs];
  DREAM_INLINE StepF32 read(const float* panel) {
    StepF32 step;
    for (int v = 0; v < kVecs; ++v) step.weight[v] = load(panel + v * kLanes);
    return step;
  }
  __attribute__((always_inline)) void add(floats* sum, const float* x) const {
    for (int v = 0; v < kVecs; ++v) sum[v] += weight[v] * x[0];
  }
};

struct StepBf16 {
  typedef bf16 T;
  static constexpr int64_t kInputs = 2;
  floats even[kVecs], odd[kVecs];
  DREAM_INLINE StepBf16 read(const bf16* panel) {
    StepBf16 step;
    for (int v = 0; v < kVecs; ++v) {
      words pair;
      memcpy(&pair, panel + 2 * v * kLanes, sizeof pair);
      step.even[v] = (floats)(pair << 16);
      step.odd[v] = (floats)(pair & 0xffff0000u);
    }
    return step;
  }
  __attribute__((always_inline)) void add(floats* sum, const float* x) const {
    for (int v = 0; v < kVecs; ++v) sum[v] += even[v] * x[0];
    for (int v = 0; v < kVecs; ++v) sum[v] += odd[v] * x[1];
  }
};

// x as the tiles read it: (rows, padded inputs) fp32.
struct Rows {
  const float* x;
  int64_t stride;
};

template <class Step>
struct Tiles {
  const SkinnyLinear& call;
  Rows rows;

  // ROWS rows from `row` on times PANELS panels from `panel` on.
  template <int ROWS, int PANELS>
  void tile(int64_t row, int64_t panel) const;
};

template <class Step>
template <int ROWS, int PANELS>
void Tiles<Step>::tile(int64_t row, int64_t panel) const {
  typedef typename Step::T T;
  constexpr int64_t kStride = kPanel * Step::kInputs;
  const int64_t steps = (call.in + Step::kInputs - 1) / Step::kInputs;
  const T* packed = static_cast<const T*>(call.packed) + panel * steps * kStride;
  const float* x = rows.x + row * rows.stride;
  floats total[ROWS][PANELS][kVecs] = {};
  for (int64_t begin = 0; begin < steps; begin += kRun) {
    const int64_t end = begin + kRun < steps ? begin + kRun : steps;
    floats sum[ROWS][PANELS][kVecs] = {};
    for (int64_t k = begin; k < end; ++k) {
      Step step[PANELS];
      for (int p = 0; p < PANELS; ++p) {
        const T* at = packed + (p * steps + k) * kStride;
        __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead);
        step[p] = Step::read(at);
      }
      for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) step[p].add(sum[r][p], x + r * rows.stride + k * Step::kInputs);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p)
        for (int v = 0; v < kVecs; ++v) total[r][p][v] += sum[r][p][v];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) {
      float sums[kPanel];
      for (int v = 0; v < kVecs; ++v) store(sums + v * kLanes, total[r][p][v]);
      const int64_t first = (panel + p) * kPanel;
      write_row(sums, call, row + r, first);
    }
}

template <class Step>
static void all_panels(const SkinnyLinear& call, const Rows& rows) {
  all_tiles(Tiles<Step>{call, rows}, call.rows, call.out, call.threads);
}

static void run_bf16(const SkinnyLinear& call) {
  const int64_t stride = (call.in + kLanes - 1) / kLanes * kLanes;
  Scratch wide(call.rows * stride);
  for (int64_t r = 0; r < call.rows; ++r) {
    const bf16* x = static_cast<const bf16*>(call.x) + r * call.x_row;
    float* to = wide.data + r * stride;
    int64_t k = 0;
    for (; k + kLanes <= call.in; k += kLanes) store(to + k, load(x + k));
    for (; k < call.in; ++k) to[k] = scalar(x + k);
  }
  all_panels<StepBf16>(call, Rows{wide.data, stride});
}

int skinny_linear(const SkinnyLinear& call) {
  if (call.dtype == Dtype::bf16)
    run_bf16(call);
  else
    all_panels<StepF32>(call, Rows{static_cast<const float*>(call.x), call.x_row});
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
