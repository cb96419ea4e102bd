#pragma once
#include "dream/types.h"

namespace dream {

// One per-token tensor, contiguous: row i is row_bytes bytes at data + i * row_bytes.
struct GatherRows {
  const void* data;   // (v, row_bytes)
  void* out;          // (keep, row_bytes) out
  int64_t row_bytes;
};

// The best-scored visual tokens in original order. CPU pointers; outputs overlap nothing.
struct SelectVisual {
  const float* scores;         // (v) NaN refused
  int64_t v, keep;             // 0 <= keep <= v
  int64_t* indices;            // (keep) out, ascending; equal scores by lowest index
  const GatherRows* tensors;   // (count) gathered with the same indices
  int64_t count;
};

void select_visual_cpu(const SelectVisual& call);  // throws std::invalid_argument on NaN

}  // namespace dream
