#include "dream/expand_tree.h"

#include <cmath>

#include "cpu/isa.h"
#include "cpu/lanes.h"

namespace dream::DREAM_ISA {

constexpr int64_t kBlock = 128;             // logits looked at together when hunting for a new top value
constexpr int64_t kParallelLogits = 65536;  // below this a parallel region costs more than it saves

// Sorted insertion into the best `width` so far: an equal value goes behind, so the lowest index stays first.
DREAM_INLINE void insert(float* values, int64_t* ids, int64_t& count, int64_t width, float value, int64_t id) {
  int64_t at = count < width ? count++ : width - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    ids[at] = ids[at - 1];
  }
  values[at] = value;
  ids[at] = id;
}

template <class T>
DREAM_INLINE void top(const T* x, int64_t vocab, int64_t width, float* values, int64_t* ids) {
  int64_t count = 0, i = 0;
  for (; i < width; ++i) insert(values, ids, count, width, scalar(x + i), i);
  for (; i + kBlock <= vocab; i += kBlock) {
    floats high = load(x + i);
    for (int64_t j = kLanes; j < kBlock; j += kLanes) high = vmax(load(x + i + j), high);
    if (!(hmax(high) > values[width - 1])) continue;
    for (int64_t j = i; j < i + kBlock; ++j)
      if (scalar(x + j) > values[width - 1]) insert(values, ids, count, width, scalar(x + j), j);
  }
  for (; i < vocab; ++i)
    if (scalar(x + i) > values[width - 1]) insert(values, ids, count, width, scalar(x + i), i);
}

template <class T>
DREAM_INLINE float sum_exp(const T* x, int64_t vocab, float high) {
  floats sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= vocab; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sum[j] += vexp(load(x + i + j * kLanes) - high);
  float tail = 0;
  for (; i < vocab; ++i) tail += expf(scalar(x + i) - high);
  return hsum((sum[0] + sum[1]) + (sum[2] + sum[3])) + tail;
}

// One row; false when it holds NaN or +inf. The row of `cumulative` serves as the list of top logits meanwhile.
template <class T>
DREAM_INLINE bool expand_row(const ExpandTree& call, int64_t row) {
  const T* x = static_cast<const T*>(call.logits) + row * call.row_stride;
  float* values = call.cumulative + row * call.width;
  top(x, call.vocab, call.width, values, call.tokens + row * call.width);
  const float high = values[0];
  if (high == kNegInf) {
    for (int64_t i = 0; i < call.vocab; ++i)
      if (scalar(x + i) != kNegInf) return false;
    return true;
  }
  const float sum = sum_exp(x, call.vocab, high);
  if (!(sum >= 0)) return false;
  const float log_sum = logf(sum);
  for (int64_t j = 0; j < call.width; ++j) values[j] = call.scores[row] + ((values[j] - high) - log_sum);
  return true;
}

static bool expand_any(const ExpandTree& call, int64_t row) {
  return call.dtype == Dtype::f32 ? expand_row<float>(call, row) : expand_row<bf16>(call, row);
}

int64_t expand_tree(const ExpandTree& call) {  // the first row refused, or -1
  int64_t refused = call.rows;
#pragma omp parallel for num_threads(call.threads) schedule(static) reduction(min : refused) \
    if (call.threads > 1 && call.rows > 1 && call.rows * call.vocab >= kParallelLogits)
  for (int64_t row = 0; row < call.rows; ++row)
    if (!expand_any(call, row) && row < refused) refused = row;
  if (refused < call.rows) return refused;

  if (call.rows == 0) return -1;
  Scratch values(call.width);
  int64_t count = 0;
  for (int64_t i = 0; i < call.rows * call.width; ++i)
    if (count < call.width || call.cumulative[i] > values.data[call.width - 1])
      insert(values.data, call.best, count, call.width, call.cumulative[i], i);
  return -1;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
#include <stdexcept>
#include <string>

DREAM_DISPATCH(int64_t, expand_tree, const ExpandTree&)

void dream::expand_tree_cpu(const ExpandTree& call) {
  for (int64_t row = 0; row < call.rows; ++row)
    if (std::isnan(call.scores[row]))
      throw std::invalid_argument("expand_tree: scores: wanted numbers, got NaN at " + std::to_string(row));
  const int64_t refused = expand_tree_dispatch(call);
  if (refused >= 0)
    throw std::invalid_argument("expand_tree: logits: wanted numbers or -inf, got NaN or +inf in row " + std::to_string(refused));
}
#endif
