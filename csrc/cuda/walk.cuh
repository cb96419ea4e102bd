// What the two acceptance operators share: the choice of a node from the splits of its row, and the walk along the choices.
#pragma once
#include "cuda/vocab_rows.cuh"

namespace dream {

constexpr int kMaxWalkNodes = 64;
constexpr uint32_t kGreatestOrder = 0xffffffffu;  // above the order of every number: NaN among logits, a refused row of probabilities

// The greatest value seen, by its order, and the lowest id that has it.
struct Choice {
  uint32_t order;
  int32_t id;
  uint32_t any;  // not 0: one of the values was worth choosing
};

constexpr int kChoiceWarps = kChoiceThreads / kWarp;
static_assert(kChoiceWarps <= kWarp && kMaxRowSplits <= kWarp, "one choice a lane");

// The best of the lanes' choices, in every lane.
__device__ __forceinline__ Choice merge_choices(const Choice& mine) {
  const uint32_t order = __reduce_max_sync(kAllLanes, mine.order);
  const uint32_t id = __reduce_min_sync(kAllLanes, mine.order == order ? static_cast<uint32_t>(mine.id) : 0xffffffffu);
  return {order, static_cast<int32_t>(id), static_cast<uint32_t>(__any_sync(kAllLanes, mine.any != 0))};
}

// The best of a block's choices goes to `out`. `shared` holds kChoiceWarps.
__device__ __forceinline__ void store_choice(const Choice& mine, Choice* shared, Choice* out) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Choice of_warp = merge_choices(mine);
  if (lane == 0) shared[warp] = of_warp;
  __syncthreads();
  if (warp > 0) return;
  const Choice of_block = merge_choices(lane < kChoiceWarps ? shared[lane] : Choice{kNoOrder, kNoId, 0});
  if (lane == 0) *out = of_block;
}

struct Walk {
  const int64_t *tokens, *parents;  // (batch, nodes)
  const int64_t* choices;           // (batch, nodes), or null: they are merged from `splits`
  const Choice* parts;              // (batch, nodes, splits)
  int32_t nodes, splits;
  bool sampled;                     // a row that was refused, or has no value worth choosing, is a choice of -1, which ends the path
  int64_t *path, *length, *bonus;
};

int choice_splits(Dtype dtype, int64_t batch, int64_t nodes, int64_t vocab);

// Launches the walk over every sequence.
void walk_tree(const char* op, const Walk& walk, int64_t batch, cudaStream_t stream);

// Launchers refuse what a walk has no room for.
void check_nodes(const char* op, int64_t nodes);

}  // namespace dream
