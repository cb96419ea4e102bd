#include "dream/rank_tree.h"

#include "cuda/vocab_rows.cuh"

namespace dream {

constexpr int kMaxPicks = 63;
constexpr int kRankWarps = kRankThreads / kWarp;
constexpr int kGroups = kMaxDeviceCandidates / kWarp;  // a warp's worth of neighbouring candidates each
constexpr int kGroupsPerLane = kGroups / kWarp;
static_assert(kGroups % kWarp == 0 && kMaxPicks < 2 * kWarp && kRankThreads >= kMaxPicks, "one warp knows all groups and all nodes");

struct RankLaunch {
  const float* scores;
  const int64_t* parent_candidates;
  int64_t *picked, *parents, *depth, *ancestors;
  int64_t out_stride;
  int32_t candidates, picks;
};

struct RankShared {
  uint32_t orders[kMaxDeviceCandidates];  // each is read by the thread that wrote it
  int32_t counts[2][kRankWarps];  // in turns, so that a step needs one barrier
  uint32_t above[kGroups];        // bit l of group g: candidate 32 g + l is better than the threshold; later: is picked
  uint32_t ties[kGroups];         // is at the threshold
  int32_t before[kGroups];        // picked in the groups before
  int32_t picked[kMaxPicks];
};

// An order that at least `picks` candidates reach and fewer exceed, found bit by bit from the top. All threads of the block.
__device__ __forceinline__ uint32_t find_threshold(RankShared& s, int candidates, int picks) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (candidates == picks) return kNoOrder;  // all exceed it
  uint32_t order = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t wanted = order | 1u << bit;
    int count = 0;
    for (int first = warp * kWarp; first < candidates; first += kRankThreads)
      count += __popc(__ballot_sync(kAllLanes, first + lane < candidates && s.orders[first + lane] >= wanted));
    if (lane == 0) s.counts[bit % 2][warp] = count;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < kRankWarps; ++w) total += s.counts[bit % 2][w];
    if (total >= picks) order = wanted;
    if (total == picks) break;  // scores differ in far fewer bits than they have
  }
  return order;
}

__device__ __forceinline__ int sum_before(int x) {  // over the lanes below
  const int lane = threadIdx.x % kWarp;
  int sum = x;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += below;
  }
  return sum - x;
}

__device__ __forceinline__ uint32_t first_bits(uint32_t mask, int count) {  // the lowest `count` set bits
  uint32_t kept = 0;
  for (int i = 0; i < count && mask; ++i) {
    kept |= mask & (0u - mask);
    mask &= mask - 1;
  }
  return kept;
}

// One warp: the first ties join those above the threshold, until there are `picks`; then the picked before each group are counted.
__device__ __forceinline__ void choose_groups(RankShared& s, int groups, int picks) {
  const int first = threadIdx.x % kWarp * kGroupsPerLane;
  int above = 0, ties = 0;
  for (int g = first; g < min(first + kGroupsPerLane, groups); ++g) above += __popc(s.above[g]), ties += __popc(s.ties[g]);
  const int above_before = sum_before(above), ties_before = sum_before(ties);
  const int all_above = __shfl_sync(kAllLanes, above_before + above, kWarp - 1);
  int left = max(picks - all_above - ties_before, 0);
  int before = above_before + min(ties_before, picks - all_above);
  for (int g = first; g < min(first + kGroupsPerLane, groups); ++g) {
    const uint32_t kept = first_bits(s.ties[g], left);
    left -= __popc(kept);
    s.above[g] |= kept;
    s.before[g] = before;
    before += __popc(s.above[g]);
  }
}

__device__ __forceinline__ bool is_picked(const RankShared& s, int64_t candidate) {
  return s.above[candidate / kWarp] >> candidate % kWarp & 1;
}

// The node that a picked candidate becomes.
__device__ __forceinline__ int node_of(const RankShared& s, int64_t candidate) {
  return s.before[candidate / kWarp] + __popc(s.above[candidate / kWarp] & ((1u << candidate % kWarp) - 1)) + 1;
}

// The value that lane node % kWarp holds for `node`.
template <class T>
__device__ __forceinline__ T at_node(const T (&values)[2], int node) {
  const T low = __shfl_sync(kAllLanes, values[0], node % kWarp), high = __shfl_sync(kAllLanes, values[1], node % kWarp);
  return node < kWarp ? low : high;
}

// One warp, lane l with nodes l and l + kWarp: all outputs. Ancestors double with every step: a node learns what its 2^step-th
// ancestor knows.
__device__ __forceinline__ void write_nodes(const RankLaunch& p, const RankShared& s) {
  const int lane = threadIdx.x % kWarp;
  const int64_t in = int64_t{blockIdx.x} * p.candidates, out = int64_t{blockIdx.x} * p.out_stride;
  int up[2], parents[2];
  uint64_t ancestors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int node = lane + half * kWarp, candidate = node > 0 && node <= p.picks ? s.picked[node - 1] : 0;
    int64_t above = node > 0 && node <= p.picks ? p.parent_candidates[in + candidate] : -1;
    if (above < 0 || above >= candidate || !is_picked(s, above)) above = -1;
    parents[half] = up[half] = above < 0 ? 0 : node_of(s, above);
    ancestors[half] = uint64_t{1} << node;
    if (node > 0 && node <= p.picks) p.picked[out + node - 1] = candidate;
  }
#pragma unroll
  for (int reach = 1; reach <= kMaxPicks; reach *= 2) {
    const uint64_t known[2] = {at_node(ancestors, up[0]), at_node(ancestors, up[1])};
    const int further[2] = {at_node(up, up[0]), at_node(up, up[1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) ancestors[half] |= known[half], up[half] = further[half];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int node = lane + half * kWarp;
    if (node > p.picks) continue;
    p.parents[out + node] = node == 0 ? -1 : parents[half];
    p.depth[out + node] = __popcll(ancestors[half]) - 1;
    p.ancestors[out + node] = static_cast<int64_t>(ancestors[half]);
  }
}

// One block a sequence.
__global__ void __launch_bounds__(kRankThreads) rank_tree_kernel(const RankLaunch p) {
  SIMT_SHARED(RankShared, shared, 1);
  RankShared& s = shared[0];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, groups = (p.candidates + kWarp - 1) / kWarp;
  const float* scores = p.scores + int64_t{blockIdx.x} * p.candidates;
  for (int i = threadIdx.x; i < p.candidates; i += kRankThreads) s.orders[i] = order_of(fmaxf(scores[i], -kInfinity));
  const uint32_t threshold = find_threshold(s, p.candidates, p.picks);
  for (int group = warp; group < groups; group += kRankWarps) {
    const int i = group * kWarp + lane;
    const uint32_t order = i < p.candidates ? s.orders[i] : kNoOrder;
    const unsigned above = __ballot_sync(kAllLanes, order > threshold), ties = __ballot_sync(kAllLanes, order == threshold);
    if (lane == 0) s.above[group] = above, s.ties[group] = ties;
  }
  __syncthreads();
  if (warp == 0) choose_groups(s, groups, p.picks);
  __syncthreads();
  for (int i = threadIdx.x; i < p.candidates; i += kRankThreads)
    if (is_picked(s, i)) s.picked[node_of(s, i) - 1] = i;
  __syncthreads();
  if (warp == 0) write_nodes(p, s);
}

static const Prepared prepared([] { prepare(rank_tree_kernel); });

void rank_tree_cuda(const RankTree& call, int device, void* stream) {
  if (call.batch == 0) return;
  if (call.candidates > kMaxDeviceCandidates || call.picks > kMaxPicks || call.picks > call.candidates)
    throw std::invalid_argument("rank_tree: candidates: wanted at most 4096 on CUDA and no fewer than picks (at most 63), got " +
                                std::to_string(call.candidates) + " and " + std::to_string(call.picks) + " picks");
  const OnDevice current(device);
  SIMT_LAUNCH(rank_tree_kernel, dim3(static_cast<unsigned>(call.batch)), dim3(kRankThreads), 0, static_cast<cudaStream_t>(stream),
              RankLaunch{call.scores, call.parent_candidates, call.picked, call.parents, call.depth, call.ancestors, call.out_stride,
                         static_cast<int32_t>(call.candidates), static_cast<int32_t>(call.picks)});
  check_launch("rank_tree");
}

}  // namespace dream
