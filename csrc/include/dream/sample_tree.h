#pragma once
#include "dream/types.h"

namespace dream {

// Sampled acceptance of verified trees, one a sequence: the choice after a node of depth d is argmax(probabilities /
// noise[d]), which is what torch.multinomial draws with that noise. Outputs overlap nothing.
struct SampleTree {
  const int64_t* tokens;       // (batch, nodes) token of each node
  const int64_t* parents;      // (batch, nodes) parents[0] = -1, otherwise 0 <= parents[i] < i
  const int64_t* depth;        // (batch, nodes) depth[0] = 0, otherwise depth[parents[i]] + 1
  const float* probabilities;  // (batch, nodes, vocab) at least 0; strides below, unit column stride
  const float* noise;          // (batch, levels, vocab) positive; strides below, unit column stride
  int64_t batch;
  int64_t nodes;               // at least 1; at most 64 on CUDA
  int64_t vocab;               // at least 1
  int64_t levels;              // more than the greatest depth
  int64_t batch_stride, row_stride;              // elements between sequences and rows of probabilities
  int64_t noise_batch_stride, noise_row_stride;  // of noise
  int64_t* path;               // (batch, nodes) out: ascending node indices from the root, then -1
  int64_t* length;             // (batch) out, nodes on the path
  int64_t* bonus;              // (batch) out, the choice after the path's last node
  void* workspace;             // CUDA: sample_tree_workspace bytes
};

// Rows off the path are never read. Throws std::invalid_argument when parents or depth are not those of a tree in order, and
// where a row on the path holds NaN, infinite probabilities, none that is positive, or noise that is not.
void sample_tree_cpu(const SampleTree& call);

// The choice of one row, (vocab) probabilities and noise as above, or -1 where sample_tree_cpu would throw.
int64_t sample_row_cpu(const float* probabilities, const float* noise, int64_t vocab);

// Reads every row once. A row that sample_tree_cpu would refuse is a choice of -1, which ends the path there.
void sample_tree_cuda(const SampleTree& call, int device, void* stream);
int64_t sample_tree_workspace(const SampleTree& call);

}  // namespace dream
