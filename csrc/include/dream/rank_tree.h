#pragma once
#include "dream/types.h"

namespace dream {

constexpr int64_t kMaxDeviceCandidates = 4096;  // a sequence on CUDA: they stay in shared memory

// The best candidates of drafts, as trees, one a sequence. Outputs are written by the kernel and overlap nothing.
struct RankTree {
  const float* scores;               // (batch, candidates) cumulative log-probabilities
  const int64_t* parent_candidates;  // (batch, candidates) parent candidate, smaller than the own index; -1 = root
  int64_t batch, candidates;
  int64_t picks;                     // min(nodes - 1, candidates), at most 63
  int64_t* picked;                   // (batch, picks) out, candidate indices ascending
  int64_t* parents;                  // (batch, picks + 1) out, node index of the parent, -1 for node 0
  int64_t* depth;                    // (batch, picks + 1) out, 0 for node 0
  int64_t* ancestors;                // (batch, picks + 1) out, bit j = node j is an ancestor of the node or the node itself
  int64_t out_stride;                // elements between sequences, the same for all four outputs
};

void rank_tree_cpu(const RankTree& call);  // throws std::invalid_argument on NaN, bad parents, rising scores

// NaN counts as -inf; a candidate whose parent was not picked, or is no candidate before it, becomes a child of the root.
void rank_tree_cuda(const RankTree& call, int device, void* stream);

}  // namespace dream
