#pragma once
#include "dream/types.h"

namespace dream {

// One per-token tensor, contiguous: row i is row_bytes bytes at data + i * row_bytes.
struct GatherRows {
  const void* data;   // (v, row_bytes)
  void* out;          // (keep, row_bytes) out
  int64_t row_bytes;
};

// The best-scored visual tokens in original order. Outputs overlap nothing.
struct SelectVisual {
  const float* scores;         // (v)
  int64_t v, keep;             // 0 <= keep <= v
  int64_t* indices;            // (keep) out, ascending; equal scores by lowest index
  const GatherRows* tensors;   // (count) on the host: gathered with the same indices
  int64_t count;
};

void select_visual_cpu(const SelectVisual& call);  // throws std::invalid_argument on NaN
void select_visual_cuda(const SelectVisual& call, int device, void* stream);  // NaN counts as -inf, -0 as 0

}  // namespace dream
