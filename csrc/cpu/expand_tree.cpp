#include "dream/expand_tree.h"

#include <cmath>

#include "cpu/isa.h"
#include "cpu/lanes.h"

namespace dream::DREAM_ISA {

constexpr int64_t kBlock = 128;             // logits looked at together: most hold no new top value
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

// What is known of a row so far: the best logits, their largest, and the sum of e^(x - high), in lanes.
struct Row {
  float* values;
  int64_t* ids;
  int64_t count, width;
  float high;
  floats sum[4];
};

// kBlock logits, the first `valid` of them from id `first` on, the others -inf; false when there is NaN among nothing but -inf.
template <class T>
DREAM_INLINE bool add_block(Row& row, const T* x, int64_t first, int64_t valid) {
  floats highest = load(x);
  for (int64_t j = kLanes; j < kBlock; j += kLanes) highest = vmax(load(x + j), highest);
  const float high = hmax(highest);
  if (row.count < row.width || high > row.values[row.width - 1])
    for (int64_t j = 0; j < valid; ++j)
      if (row.count < row.width || scalar(x + j) > row.values[row.width - 1])
        insert(row.values, row.ids, row.count, row.width, scalar(x + j), first + j);
  if (!(high > kNegInf)) {
    for (int64_t j = 0; j < valid; ++j)
      if (scalar(x + j) != kNegInf) return false;
    return true;
  }
  if (high > row.high) {
    const float shrink = expf(row.high - high);
    for (auto& sum : row.sum) sum *= shrink;
    row.high = high;
  }
  for (int64_t j = 0; j < kBlock; j += 4 * kLanes)
    for (int i = 0; i < 4; ++i) row.sum[i] += vexp(load(x + j + i * kLanes) - row.high);
  return true;
}

// One row of all sequences', each logit read once; false when it holds NaN or +inf. The row of `cumulative` is the list of top
// logits meanwhile.
template <class T>
DREAM_INLINE bool expand_row(const ExpandTree& call, int64_t index) {
  const T* x = static_cast<const T*>(call.logits) + index / call.rows * call.batch_stride + index % call.rows * call.row_stride;
  Row row{call.cumulative + index * call.width, call.tokens + index * call.width, 0, call.width, kNegInf, {}};
  int64_t i = 0;
  for (; i + kBlock <= call.vocab; i += kBlock)
    if (!add_block(row, x + i, i, kBlock)) return false;
  if (i < call.vocab) {
    T tail[kBlock];
    for (auto& logit : tail) store_scalar(&logit, kNegInf);
    memcpy(tail, x + i, (call.vocab - i) * sizeof(T));
    if (!add_block(row, tail, i, call.vocab - i)) return false;
  }
  if (row.high == kNegInf) return true;
  const float sum = hsum((row.sum[0] + row.sum[1]) + (row.sum[2] + row.sum[3]));
  if (!(sum >= 0)) return false;
  const float log_sum = logf(sum);
  for (int64_t j = 0; j < call.width; ++j) row.values[j] = call.scores[index] + ((row.values[j] - row.high) - log_sum);
  return true;
}

static bool expand_any(const ExpandTree& call, int64_t row) {
  return call.dtype == Dtype::f32 ? expand_row<float>(call, row) : expand_row<bf16>(call, row);
}

int64_t expand_tree(const ExpandTree& call) {  // the first row refused, or -1
  const int64_t rows = call.batch * call.rows;
  int64_t refused = rows;
#pragma omp parallel for num_threads(call.threads) schedule(static) reduction(min : refused) \
    if (call.threads > 1 && rows > 1 && rows * call.vocab >= kParallelLogits)
  for (int64_t row = 0; row < rows; ++row)
    if (!expand_any(call, row) && row < refused) refused = row;
  if (refused < rows) return refused;

  if (rows == 0) return -1;
  Scratch values(call.width);
  for (int64_t b = 0; b < call.batch; ++b) {
    const float* cumulative = call.cumulative + b * call.rows * call.width;
    int64_t count = 0;
    for (int64_t i = 0; i < call.rows * call.width; ++i)
      if (count < call.width || cumulative[i] > values.data[call.width - 1])
        insert(values.data, call.best + b * call.width, count, call.width, cumulative[i], i);
  }
  return -1;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
#include <stdexcept>
#include <string>

DREAM_DISPATCH(int64_t, expand_tree, const ExpandTree&)

void dream::expand_tree_cpu(const ExpandTree& call) {
  for (int64_t row = 0; row < call.batch * call.rows; ++row)
    if (std::isnan(call.scores[row]))
      throw std::invalid_argument("expand_tree: scores: wanted numbers, got NaN at " + std::to_string(row));
  const int64_t refused = expand_tree_dispatch(call);
  if (refused >= 0)
    throw std::invalid_argument("expand_tree: logits: wanted numbers or -inf, got NaN or +inf in row " + std::to_string(refused));
}
#endif
