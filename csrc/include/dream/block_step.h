#pragma once
#include "dream/block_merge.h"
#include "dream/block_project.h"
#include "dream/tree_attention.h"

namespace dream {

// A whole block over the nodes of a tree: block_project, whose keys and values go straight to their slots of the cache,
// tree_attention over the cache, block_merge. What passes between the three is scratch of the kernel.
struct BlockStep {
  BlockProject project;     // q is written by the kernel; k and v point to slot `start` of the cache
  TreeAttention attention;  // one sequence; q and out are set by the kernel
  BlockMerge merge;         // attended is set by the kernel
};

void block_step_cpu(const BlockStep& call);

}  // namespace dream
