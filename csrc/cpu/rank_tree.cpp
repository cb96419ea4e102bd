#include "dream/rank_tree.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace dream {

static void check(const RankTree& call) {
  for (int64_t i = 0; i < call.candidates; ++i) {
    if (std::isnan(call.scores[i]))
      throw std::invalid_argument("rank_tree: scores: wanted numbers, got NaN at " + std::to_string(i));
    const int64_t parent = call.parent_candidates[i];
    if (parent < -1 || parent >= i)
      throw std::invalid_argument("rank_tree: parents: wanted -1 or an index below " + std::to_string(i) + " at " +
                                  std::to_string(i) + ", got " + std::to_string(parent));
  }
}

void rank_tree_cpu(const RankTree& call) {
  check(call);
  std::vector<int64_t> order(call.candidates);
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](int64_t a, int64_t b) {
    return call.scores[a] > call.scores[b] || (call.scores[a] == call.scores[b] && a < b);
  };
  if (call.picks < call.candidates) std::nth_element(order.begin(), order.begin() + call.picks, order.end(), better);
  std::sort(order.begin(), order.begin() + call.picks);

  std::vector<int64_t> node_of(call.candidates, -1);
  call.parents[0] = -1;
  call.depth[0] = 0;
  call.ancestors[0] = 1;
  for (int64_t i = 0; i < call.picks; ++i) {
    const int64_t candidate = order[i], above = call.parent_candidates[candidate], node = i + 1;
    const int64_t parent = above < 0 ? 0 : node_of[above];
    if (parent < 0)
      throw std::invalid_argument("rank_tree: scores: wanted scores that never rise from parent to child, got candidate " +
                                  std::to_string(candidate) + " above its parent " + std::to_string(above));
    node_of[candidate] = node;
    call.picked[i] = candidate;
    call.parents[node] = parent;
    call.depth[node] = call.depth[parent] + 1;
    call.ancestors[node] = static_cast<int64_t>(static_cast<uint64_t>(call.ancestors[parent]) | uint64_t{1} << node);
  }
}

}  // namespace dream
