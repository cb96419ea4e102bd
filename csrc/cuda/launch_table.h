// Block sizes and split counts of the kernels, each with its reason. Splits depend on sizes the host knows, never on the device.
#pragma once
#include <cstdint>

namespace dream {

constexpr int kMultiprocessors = 132;  // H100 and H200; an A100 has 108

// tree_attention, cross_attention
constexpr int kAttentionWarps = 4;  // one for each of a multiprocessor's four schedulers; two or three blocks share it
// Two blocks with a tile of 16 KB or more under way each keep 32 KB in flight on a multiprocessor; an H200 needs 25 KB (4.8 TB/s x
// 0.7 us / 132). More blocks would only write more partial results.
constexpr int kAttentionBlocks = 2 * kMultiprocessors;
// A share of n slots costs a block n keys and values read, and a partial result of its 16, 32 or 64 rows written and read again, each
// as long as a key in fp32, that is as a key and its value: with four slots a row the partial results stay below half of the traffic,
// and in the second-level cache.
constexpr int kAttentionSlotsPerRow = 4;
constexpr int kCombineWarps = 4;  // a row each; 1,024 rows (32 heads x 32 nodes) are 256 blocks

// expand_tree, verify_tree, sample_tree: rows of a vocabulary, split into 16-byte words
constexpr int kMaxRowSplits = 32;         // a warp merges a row's splits, one a lane
constexpr int kRowWordsInFlight = 4;      // 64 bytes a thread: 48 KB or more a multiprocessor; an H200 needs 25 KB
constexpr int kRowPairsInFlight = 2;      // of probabilities and noise: the same bytes
constexpr int kExpandThreads = 256;       // 4 x 262,208 logits in 128 blocks: all words of a thread are under way at once
constexpr int kExpandBlocks = 3;          // a multiprocessor, of 80 registers a thread
constexpr int kExpandLeastWords = 128;    // a split, so that 4 x 32,000 logits are 124 blocks
constexpr int kMergeWarps = 8;            // a frontier has 4 to 10 rows, and a warp merges one
constexpr int kChoiceThreads = 256;
constexpr int kChoiceBlocks = 4;          // a multiprocessor, of 64 registers a thread
constexpr int kChoiceLeastWords = 256;    // a split: 32 rows are enough blocks without finer ones
constexpr int kWalkThreads = 256;         // 8 warps merge the splits of 32 nodes in 4 turns, then one walks

// Splits of each of `rows` rows: all blocks are resident at once, and none has fewer words than `least`.
constexpr int row_splits(int64_t rows, int64_t words, int64_t blocks_per_multiprocessor, int64_t least) {
  const int64_t wanted = blocks_per_multiprocessor * kMultiprocessors / rows, full = words / least;
  const int64_t splits = wanted < full ? wanted : full;
  return splits < 1 ? 1 : splits > kMaxRowSplits ? kMaxRowSplits : static_cast<int>(splits);
}

// rank_tree
constexpr int kRankThreads = 256;  // width 4, depth 6 has 84 candidates, width 10 has 510: one or two a thread

// select_visual
constexpr int kSelectThreads = 1024;  // one block for the whole selection: all the threads it can have hide the latency of its loads
constexpr int kSelectItems = 4;       // scores per thread and step: v = 2,880 is one step
constexpr int kGatherThreads = 128;   // a row of 8 KB is four 16-byte words per thread, all under way at once
constexpr int kGatherWords = 4;       // of a thread under way
constexpr int kGatherTensors = 16;    // a model has fewer tensors per token; a block finds its tensor without a search

// attention_entropy
constexpr int kEntropyWarps = 4;    // of 32 rows (fp32: 8): keys come through the L2 cache once for 128 rows, below its bandwidth
constexpr int kEntropyKeys = 64;    // per tile: with two tiles under way three blocks of head_dim 128 fit a multiprocessor
constexpr int kEntropyBlocks = 3;   // per multiprocessor: at most 168 registers, twelve warps to overlap exponentials and products

// attention_mass
// Each with its own 32 keys of a tile and all rows of the block: 32 KB of head_dim 128 under way for each of a multiprocessor's two blocks.
constexpr int kMassWarps = 4;
constexpr int kMassBlocks = 2 * kMultiprocessors;  // wanted for the pass over rows, by splitting keys
constexpr int kMassSplits = 32;     // at most: the pass over keys reads all of a row's partial sums
constexpr int kMassSumThreads = 128;

}  // namespace dream
