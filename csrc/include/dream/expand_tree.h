#pragma once
#include "dream/types.h"

namespace dream {

// One level of draft growth. Every pointer is on the CPU; outputs are written by the kernel and overlap nothing.
struct ExpandTree {
  const void* logits;   // (rows, vocab) dtype; row stride below, unit column stride; -inf allowed, NaN and +inf refused
  Dtype dtype;          // f32 or bf16; all arithmetic is fp32
  const float* scores;  // (rows) cumulative log-probability of each frontier node
  int64_t rows, vocab;
  int64_t row_stride;   // elements between rows of logits
  int64_t width;        // children per row, 1 <= width <= vocab
  int64_t* tokens;      // (rows, width) out, best first, equal logits by lowest id
  float* cumulative;    // (rows, width) out, scores + log_softmax; a row of -inf only gives -inf
  int64_t* best;        // (width, or 0 when rows is 0) out, flat indices into cumulative, best first, ties by lowest index
  int threads;
};

void expand_tree_cpu(const ExpandTree& call);  // throws std::invalid_argument when a row holds NaN or +inf

}  // namespace dream
