#pragma once
#include "dream/types.h"

namespace dream {

// Greedy acceptance of verified trees, one a sequence. Outputs overlap nothing.
struct VerifyTree {
  const int64_t* tokens;   // (batch, nodes) token of each node
  const int64_t* parents;  // (batch, nodes) parents[0] = -1, otherwise 0 <= parents[i] < i
  const int64_t* choices;  // (batch, nodes) the target's choice after each node; null: the argmax of its logits
  const void* logits;      // (batch, nodes, vocab) dtype; strides below, unit column stride; or null
  Dtype dtype;             // of the logits
  int64_t batch;
  int64_t nodes;           // at least 1; at most 64 on CUDA
  int64_t vocab;           // at least 1 where there are logits
  int64_t batch_stride, row_stride;  // elements between sequences and rows of logits
  int64_t* path;           // (batch, nodes) out: ascending node indices from the root, then -1
  int64_t* length;         // (batch) out, nodes on the path
  int64_t* bonus;          // (batch) out, the choice after the path's last node
  void* workspace;         // CUDA: verify_tree_workspace bytes
};

// Reads logits on the path only. Throws std::invalid_argument when parents are not a tree in order.
void verify_tree_cpu(const VerifyTree& call);

// Reads all logits once. Where parents are not a tree in order the outputs mean nothing, but nothing else is touched.
void verify_tree_cuda(const VerifyTree& call, int device, void* stream);
int64_t verify_tree_workspace(const VerifyTree& call);

}  // namespace dream
