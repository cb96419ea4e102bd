// Rows of a vocabulary, each element read once, in 16-byte words wherever a row starts; and orders, which let integers compare
// floats.
#pragma once
#include <limits>
#include <string>

#include "cuda/device.cuh"
#include "cuda/launch_table.h"

namespace dream {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kNoOrder = 0;  // below the order of every number
constexpr int32_t kNoId = std::numeric_limits<int32_t>::max();  // above every id

// A number's place among all: greater numbers have greater orders, and equal ones equal orders (-0 is 0). Not for NaN.
__device__ __forceinline__ uint32_t order_of(float x) {
  const int bits = __float_as_int(x + 0.f);
  return static_cast<uint32_t>(bits ^ (bits >> 31 | static_cast<int>(0x80000000u)));
}

__device__ __forceinline__ float value_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// A row as 16-byte words of the memory it lies in: word 0 holds the row's first element, behind `lead` that are not the row's.
template <class T>
struct VocabRow {
  static constexpr int kItems = 16 / sizeof(T);
  using Word = uint4;
  struct Items {
    float x[kItems];
    unsigned inside;  // bit e: item e is the row's; others are -inf
  };

  __device__ __forceinline__ VocabRow(const T* row, int vocab)
      : row(row), vocab(vocab), lead(static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T))) {}

  __device__ __forceinline__ int first_id(int word) const { return word * kItems - lead; }

  // Whether all of a word is the row's.
  __device__ __forceinline__ bool whole(int word) const { return first_id(word) >= 0 && first_id(word) + kItems <= vocab; }

  __device__ __forceinline__ Word load(int word) const { return *reinterpret_cast<const uint4*>(row + first_id(word)); }

  __device__ __forceinline__ Items unpack(const Word& word) const {
    const T* items = reinterpret_cast<const T*>(&word);
    Items out{{}, (1u << kItems) - 1};
#pragma unroll
    for (int e = 0; e < kItems; ++e) out.x[e] = to_float(items[e]);
    return out;
  }

  // A word that the row shares with others, item by item; nothing where `wanted` is false.
  __device__ __forceinline__ Items load_part(int word, bool wanted) const {
    Items out{{}, 0};
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const int id = first_id(word) + e;
      const bool is = wanted && id >= 0 && id < vocab;
      out.x[e] = is ? to_float(row[id]) : -kInfinity;
      out.inside |= static_cast<unsigned>(is) << e;
    }
    return out;
  }

  const T* row;
  int vocab, lead;
};

// The words of one split of a row, the same for every thread of the block.
struct WordRange {
  int first, end;
};

// Splits are cut the same for all rows of a call, for the most words that an unaligned row may touch.
template <class Row>
__device__ __forceinline__ WordRange split_words(const Row& row, int split, int splits) {
  const int words = (row.vocab + 2 * Row::kItems - 2) / Row::kItems, each = (words + splits - 1) / splits;
  return {min(split * each, words), min(split * each + each, words)};
}

// Calls consume(items, first id) with the words of a range, kThreads at a time, kFlight of each thread's loaded before the first
// is used. All threads of a warp make the same calls; in the last ones some have nothing inside.
template <int kThreads, int kFlight, class Row, class Consume>
__device__ __forceinline__ void for_words(const Row& row, WordRange range, Consume consume) {
  const int lane = threadIdx.x % kWarp;
  for (int turn = range.first + threadIdx.x - lane; turn < range.end; turn += kThreads * kFlight) {
    typename Row::Word words[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      const int word = turn + lane + u * kThreads;
      if (word < range.end && row.whole(word)) words[u] = row.load(word);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (turn + u * kThreads >= range.end) break;
      const int word = turn + lane + u * kThreads;
      const bool wanted = word < range.end;
      consume(wanted && row.whole(word) ? row.unpack(words[u]) : row.load_part(word, wanted), row.first_id(word));
    }
  }
}

// Launchers refuse what 32-bit ids and words cannot count.
inline void check_vocab(const char* op, int64_t vocab) {
  if (vocab > std::numeric_limits<int32_t>::max() - 64 * kChoiceThreads * kRowWordsInFlight)
    throw std::invalid_argument(std::string(op) + ": vocab: wanted ids of 32 bits, got " + std::to_string(vocab));
}

// As row_splits, for words of 16 bytes. No dtype has more splits than f32.
inline int vocab_splits(Dtype dtype, int64_t rows, int64_t vocab, int64_t blocks_per_multiprocessor, int64_t least) {
  return row_splits(rows, ceil_div(vocab, dtype == Dtype::f32 ? 4 : 8), blocks_per_multiprocessor, least);
}

}  // namespace dream
