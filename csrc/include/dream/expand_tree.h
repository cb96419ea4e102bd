#pragma once
#include "dream/types.h"

namespace dream {

constexpr int64_t kMaxDeviceWidth = 32;  // children a row on CUDA: one a lane of a warp

// One level of draft growth, for every sequence of a batch. Outputs are written by the kernel and overlap nothing.
struct ExpandTree {
  const void* logits;   // (batch, rows, vocab) dtype; strides below, unit column stride; -inf allowed
  Dtype dtype;          // all arithmetic is fp32
  const float* scores;  // (batch, rows) cumulative log-probability of each frontier node
  int64_t batch, rows, vocab;
  int64_t batch_stride, row_stride;  // elements between sequences and rows of logits
  int64_t width;        // children per row, 1 <= width <= vocab
  int64_t* tokens;      // (batch, rows, width) out, best first, equal logits by lowest id
  float* cumulative;    // (batch, rows, width) out, scores + log_softmax; a row of -inf only gives -inf
  int64_t* best;        // (batch, width, or 0 when rows is 0) out, flat indices into a sequence's cumulative, best first, ties
                        // by lowest index
  int threads;          // CPU
  void* workspace;      // CUDA: expand_tree_workspace bytes
};

void expand_tree_cpu(const ExpandTree& call);  // throws std::invalid_argument when a row or a score holds NaN, a row +inf

// NaN counts as -inf; a row that holds +inf gives cumulative of -inf.
void expand_tree_cuda(const ExpandTree& call, int device, void* stream);
int64_t expand_tree_workspace(const ExpandTree& call);

}  // namespace dream
