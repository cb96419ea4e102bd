#include "dream/rank_tree.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace dream {

namespace {

// One sequence of a call.
struct Draft {
  const float* scores;
  const int64_t* above;  // parent candidates
  int64_t candidates, picks;
  int64_t *picked, *parents, *depth, *ancestors;
};

void check(const Draft& draft) {
  for (int64_t i = 0; i < draft.candidates; ++i) {
    if (std::isnan(draft.scores[i]))
      throw std::invalid_argument("rank_tree: scores: wanted numbers, got NaN at " + std::to_string(i));
    const int64_t parent = draft.above[i];
    if (parent < -1 || parent >= i)
      throw std::invalid_argument("rank_tree: parents: wanted -1 or an index below " + std::to_string(i) + " at " +
                                  std::to_string(i) + ", got " + std::to_string(parent));
  }
}

void rank(const Draft& draft) {
  std::vector<int64_t> order(draft.candidates);
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](int64_t a, int64_t b) {
    return draft.scores[a] > draft.scores[b] || (draft.scores[a] == draft.scores[b] && a < b);
  };
  if (draft.picks < draft.candidates) std::nth_element(order.begin(), order.begin() + draft.picks, order.end(), better);
  std::sort(order.begin(), order.begin() + draft.picks);

  std::vector<int64_t> node_of(draft.candidates, -1);
  draft.parents[0] = -1;
  draft.depth[0] = 0;
  draft.ancestors[0] = 1;
  for (int64_t i = 0; i < draft.picks; ++i) {
    const int64_t candidate = order[i], above = draft.above[candidate], node = i + 1;
    const int64_t parent = above < 0 ? 0 : node_of[above];
    if (parent < 0)
      throw std::invalid_argument("rank_tree: scores: wanted scores that never rise from parent to child, got candidate " +
                                  std::to_string(candidate) + " above its parent " + std::to_string(above));
    node_of[candidate] = node;
    draft.picked[i] = candidate;
    draft.parents[node] = parent;
    draft.depth[node] = draft.depth[parent] + 1;
    draft.ancestors[node] = static_cast<int64_t>(static_cast<uint64_t>(draft.ancestors[parent]) | uint64_t{1} << node);
  }
}

}  // namespace

void rank_tree_cpu(const RankTree& call) {
  const auto sequence = [&](int64_t b) {
    const int64_t in = b * call.candidates, out = b * call.out_stride;
    return Draft{call.scores + in,   call.parent_candidates + in, call.candidates,  call.picks,
                 call.picked + out, call.parents + out,          call.depth + out, call.ancestors + out};
  };
  for (int64_t b = 0; b < call.batch; ++b) check(sequence(b));
  for (int64_t b = 0; b < call.batch; ++b) rank(sequence(b));
}

}  // namespace dream
