#pragma once
#include "dream/types.h"

namespace dream {

// Sampled acceptance of a verified tree: the choice after a node of depth d is argmax(probabilities / noise[d]), which is
// what torch.multinomial draws with that noise. Rows off the path are never read. CPU pointers; outputs overlap nothing.
struct SampleTree {
  const int64_t* tokens;       // (nodes) token of each node
  const int64_t* parents;      // (nodes) parents[0] = -1, otherwise 0 <= parents[i] < i
  const int64_t* depth;        // (nodes) depth[0] = 0, otherwise depth[parents[i]] + 1
  const float* probabilities;  // (nodes, vocab) at least 0; row stride below, unit column stride
  const float* noise;          // (levels, vocab) positive; row stride below, unit column stride
  int64_t nodes;               // at least 1
  int64_t vocab;               // at least 1
  int64_t levels;              // more than the greatest depth
  int64_t row_stride;          // elements between rows of probabilities
  int64_t noise_stride;        // elements between rows of noise
  int64_t* path;               // (nodes) out, the first `length` entries: ascending node indices from the root
  int64_t length;              // out
  int64_t bonus;               // out, the choice after path[length - 1]
};

// Throws std::invalid_argument when parents or depth are not those of a tree in order, and where a row on the path holds
// NaN, infinite probabilities, none that is positive, or noise that is not.
void sample_tree_cpu(SampleTree& call);

// The choice of one row, (vocab) probabilities and noise as above, or -1 where sample_tree_cpu would throw.
int64_t sample_row_cpu(const float* probabilities, const float* noise, int64_t vocab);

}  // namespace dream
