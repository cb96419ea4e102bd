#pragma once
#include "dream/types.h"

namespace dream {

// Walk from the root along the target's choices. CPU pointers; path is written by the kernel and overlaps nothing.
struct VerifyTree {
  const int64_t* tokens;   // (nodes) token of each node
  const int64_t* parents;  // (nodes) parents[0] = -1, otherwise 0 <= parents[i] < i
  const int64_t* choices;  // (nodes) the target's choice after each node
  int64_t nodes;           // at least 1
  int64_t* path;           // (nodes) out, the first `length` entries: ascending node indices from the root
  int64_t length;          // out
  int64_t bonus;           // out, the choice after path[length - 1]
};

void verify_tree_cpu(VerifyTree& call);  // throws std::invalid_argument when parents are not a tree in order

}  // namespace dream
