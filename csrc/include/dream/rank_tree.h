#pragma once
#include "dream/types.h"

namespace dream {

// The best candidates of a draft, as a tree. CPU pointers; outputs are written by the kernel and overlap nothing.
struct RankTree {
  const float* scores;               // (candidates) cumulative log-probabilities, NaN refused
  const int64_t* parent_candidates;  // (candidates) parent candidate, smaller than the own index; -1 = root
  int64_t candidates;
  int64_t picks;                     // min(nodes - 1, candidates), at most 63
  int64_t* picked;                   // (picks) out, candidate indices ascending
  int64_t* parents;                  // (picks + 1) out, node index of the parent, -1 for node 0
  int64_t* depth;                    // (picks + 1) out, 0 for node 0
  int64_t* ancestors;                // (picks + 1) out, bit j = node j is an ancestor of the node or the node itself
};

void rank_tree_cpu(const RankTree& call);  // throws std::invalid_argument on NaN, bad parents, rising scores

}  // namespace dream
