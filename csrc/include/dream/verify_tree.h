#pragma once
#include "dream/types.h"

namespace dream {

// Greedy acceptance of a verified tree. CPU pointers; outputs overlap nothing.
struct VerifyTree {
  const int64_t* tokens;   // (nodes) token of each node
  const int64_t* parents;  // (nodes) parents[0] = -1, otherwise 0 <= parents[i] < i
  const int64_t* choices;  // (nodes) the target's choice after each node; null: the argmax of its logits
  const void* logits;      // (nodes, vocab) dtype, read on the path only; row stride below, unit column stride; or null
  Dtype dtype;             // of the logits, f32 or bf16
  int64_t nodes;           // at least 1
  int64_t vocab;           // at least 1 where there are logits
  int64_t row_stride;      // elements between rows of logits
  int64_t* path;           // (nodes) out, the first `length` entries: ascending node indices from the root
  int64_t length;          // out
  int64_t bonus;           // out, the choice after path[length - 1]
};

void verify_tree_cpu(VerifyTree& call);  // throws std::invalid_argument when parents are not a tree in order

}  // namespace dream
