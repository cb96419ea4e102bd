#include "dream/sample_tree.h"

#include "cpu/isa.h"
#include "cpu/lanes.h"

namespace dream {

struct SampleRow {
  const float *probabilities, *noise;
  int64_t vocab;
};

}  // namespace dream

namespace dream::DREAM_ISA {

constexpr int64_t kBlock = 256;  // tokens looked at together when hunting for a greater quotient

// A quotient p / e cannot round to more than `high` when p < high * kLess * e: kLess outweighs the roundings of the two
// products and of the quotient, and among products without all their bits the next smaller p is a whole step away.
constexpr float kLess = 1 - 0x1p-21f;

// argmax(p / e), the lowest token among equals; -1 when the row is refused. The quotients that count are IEEE divisions,
// so ties and roundings are torch's own; most are ruled out by a product, which takes a tenth of a division's time.
int64_t sample_row(const SampleRow& row) {
  const float *p = row.probabilities, *e = row.noise;
  float high = -1, low = 0;
  int64_t best = 0;
  for (int64_t i = 0; i < row.vocab; i += kBlock) {
    const int64_t end = i + kBlock < row.vocab ? i + kBlock : row.vocab;
    if (end - i == kBlock) {
      ints open = {};
      for (int64_t j = i; j < end; j += kLanes) open |= ~(ints)(load(p + j) < low * load(e + j));
      if (!any(open)) continue;
    }
    for (int64_t j = i; j < end; ++j) {
      if (p[j] < low * e[j]) continue;
      if (!(p[j] >= 0 && p[j] <= __FLT_MAX__ && e[j] > 0)) return -1;  // NaN fails every comparison and so gets here
      const float quotient = p[j] / e[j];
      if (quotient > high) high = quotient, low = high * kLess, best = j;
    }
  }
  for (int64_t j = 0; high <= 0 && j < row.vocab; ++j)  // a quotient may vanish where no probability does
    if (p[j] > 0) return best;
  return high <= 0 ? -1 : best;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
#include <cmath>

#include "cpu/walk.h"

DREAM_DISPATCH(int64_t, sample_row, const SampleRow&)

namespace dream {

static std::invalid_argument refusal(const std::string& wanted, const std::string& got) {
  return std::invalid_argument("sample_tree: " + wanted + ", got " + got);
}

static void check_depth(const SampleTree& call, int64_t sequence) {
  const int64_t *depth = call.depth + sequence * call.nodes, *parents = call.parents + sequence * call.nodes;
  for (int64_t i = 0; i < call.nodes; ++i) {
    const int64_t wanted = i == 0 ? 0 : depth[parents[i]] + 1, got = depth[i];
    if (got != wanted) throw refusal("depth: wanted " + std::to_string(wanted) + " at " + std::to_string(i), std::to_string(got));
    if (got >= call.levels)
      throw refusal("noise: wanted a row for every depth, the greatest of them at least " + std::to_string(got),
                    std::to_string(call.levels) + " rows");
  }
}

[[noreturn]] static void refuse(int64_t node, int64_t depth, const SampleRow& row) {
  for (int64_t i = 0; i < row.vocab; ++i) {
    const float p = row.probabilities[i], e = row.noise[i];
    const std::string at = " at column " + std::to_string(i) + " of row ";
    if (!(e > 0)) throw refusal("noise: wanted positive numbers", std::to_string(e) + at + std::to_string(depth));
    if (!(p >= 0 && std::isfinite(p)))
      throw refusal("probabilities: wanted finite numbers of at least 0", std::to_string(p) + at + std::to_string(node));
  }
  throw refusal("probabilities: wanted a positive one in every row", "none in row " + std::to_string(node));
}

int64_t sample_row_cpu(const float* probabilities, const float* noise, int64_t vocab) {
  return sample_row_dispatch({probabilities, noise, vocab});
}

void sample_tree_cpu(const SampleTree& call) {
  for (int64_t b = 0; b < call.batch; ++b) {
    check_parents("sample_tree", call.parents + b * call.nodes, call.nodes);
    check_depth(call, b);
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    const float *probabilities = call.probabilities + b * call.batch_stride, *noise = call.noise + b * call.noise_batch_stride;
    walk(call, b, [&](int64_t node) {
      const int64_t depth = call.depth[b * call.nodes + node];
      const SampleRow row{probabilities + node * call.row_stride, noise + depth * call.noise_row_stride, call.vocab};
      const int64_t token = sample_row_dispatch(row);
      if (token < 0) refuse(node, depth, row);
      return token;
    });
  }
}

}  // namespace dream
#endif
