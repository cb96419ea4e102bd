#pragma once
#include "dream/block_project.h"

namespace dream {

// From attended rows to the rows that leave a block: output layer, residual, norm, SwiGLU, residual. CPU pointers; sums in
// fp32; every intermediate is rounded to dtype, as a chain of torch operators rounds it.
struct BlockMerge {
  const void* x;              // (rows, hidden) dtype, the residual stream, contiguous
  const void* attended;       // (rows, attended_size) dtype, contiguous
  Dtype dtype;
  int64_t rows, hidden, attended_size, intermediate;
  PackedLayer output;         // attended_size -> hidden
  const void* norm_weight;    // (hidden) dtype, or null for 1
  float eps;
  bool round_first;           // as rms_norm.h
  PackedLayer gate_up[2];     // hidden -> intermediate each, or one layer with both outputs side by side
  int64_t gate_up_count;      // 1 or 2
  PackedLayer down;           // intermediate -> hidden
  bool gated;                 // scale both branches before they join the residual stream
  float attention_gate, mlp_gate;
  void* y;                    // (rows, hidden) dtype, contiguous; may be x
  int threads;
};

void block_merge_cpu(const BlockMerge& call);

}  // namespace dream
