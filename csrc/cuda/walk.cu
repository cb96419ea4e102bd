#include "cuda/walk.cuh"

namespace dream {

constexpr int kWalkWarps = kWalkThreads / kWarp;

// One warp: the choice of a node from the splits of its row.
__device__ __forceinline__ int64_t merge_splits(const Walk& p, int64_t node) {
  const int lane = threadIdx.x % kWarp;
  const Choice best = merge_choices(lane < p.splits ? p.parts[node * p.splits + lane] : Choice{kNoOrder, kNoId, 0});
  const bool refused = p.sampled && (best.order == kGreatestOrder || !best.any);
  return refused ? -1 : best.id;
}

// The lowest node behind `last` that is its child and holds the token `chosen`; or none, as kMaxWalkNodes. Lane l knows nodes l
// and l + kWarp.
__device__ __forceinline__ int next_node(const int64_t (&tokens)[2], const int64_t (&parents)[2], int last, int64_t chosen) {
  const int lane = threadIdx.x % kWarp;
  unsigned found[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    found[half] = __ballot_sync(kAllLanes, lane + half * kWarp > last && parents[half] == last && tokens[half] == chosen);
  return found[0] ? __ffs(static_cast<int>(found[0])) - 1 : found[1] ? kWarp + __ffs(static_cast<int>(found[1])) - 1 : kMaxWalkNodes;
}

// One block a sequence: its warps merge the choices, then one walks. A node comes behind its parent, so that a path has an end
// whatever `parents` holds.
__global__ void __launch_bounds__(kWalkThreads) walk_tree_kernel(const Walk p) {
  SIMT_SHARED(int64_t, choices, kMaxWalkNodes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first = int64_t{blockIdx.x} * p.nodes;
  if (!p.choices) {
    for (int node = warp; node < p.nodes; node += kWalkWarps) {
      const int64_t choice = merge_splits(p, first + node);
      if (lane == 0) choices[node] = choice;
    }
  } else if (static_cast<int>(threadIdx.x) < p.nodes) {
    choices[threadIdx.x] = p.choices[first + threadIdx.x];
  }
  __syncthreads();
  if (warp > 0) return;
  int64_t tokens[2], parents[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int node = lane + half * kWarp;
    tokens[half] = node < p.nodes ? p.tokens[first + node] : -1;
    parents[half] = node > 0 && node < p.nodes ? p.parents[first + node] : -1;  // no child of any node
  }
  int64_t path[2] = {-1, -1}, chosen = choices[0];  // lane l writes places l and l + kWarp of the path
  int length = 1, last = 0;
  if (lane == 0) path[0] = 0;
  while (!(p.sampled && chosen < 0)) {
    const int next = next_node(tokens, parents, last, chosen);
    if (next == kMaxWalkNodes) break;
    last = next;
    chosen = choices[last];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (length == lane + half * kWarp) path[half] = last;
    ++length;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (lane + half * kWarp < p.nodes) p.path[first + lane + half * kWarp] = path[half];
  if (lane == 0) p.length[blockIdx.x] = length, p.bonus[blockIdx.x] = chosen;
}

static const Prepared prepared([] { prepare(walk_tree_kernel); });

int choice_splits(Dtype dtype, int64_t batch, int64_t nodes, int64_t vocab) {
  return vocab_splits(dtype, batch * nodes, vocab, kChoiceBlocks, kChoiceLeastWords);
}

void walk_tree(const char* op, const Walk& walk, int64_t batch, cudaStream_t stream) {
  SIMT_LAUNCH(walk_tree_kernel, dim3(static_cast<unsigned>(batch)), dim3(kWalkThreads), 0, stream, walk);
  check_launch(op);
}

void check_nodes(const char* op, int64_t nodes) {
  if (nodes < 1 || nodes > kMaxWalkNodes)
    throw std::invalid_argument(std::string(op) + ": nodes: wanted 1 to 64 on CUDA, got " + std::to_string(nodes));
}

}  // namespace dream
