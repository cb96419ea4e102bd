// The pieces of an attention tile on tensor cores, for 16-bit types: rows of queries, keys or values in shared memory, and the
// scores of a warp's 16 query rows. Every function is for whole warps; the caller puts a barrier between threads that write a
// tile and threads that read it (after copy_async_wait, where `aligned`).
//
// A head is padded with zeros to a width D of 64, 128 or 256. A row of a tile takes D + 8 elements: 16 bytes more than a
// multiple of 128, so the eight rows that load_matrices reads at once lie in different banks.
#pragma once
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/device.cuh"

namespace dream {

template <int D>
constexpr int kPitch = D + 8;  // elements from one row of a tile to the next

// Shared memory of a tile of 16-bit elements. A multiple of 16 for every number of rows.
template <int D>
constexpr size_t tile_bytes(int rows) { return size_t{2} * rows * kPitch<D>; }

constexpr int64_t kMaxHeadDim = 256;

// Calls f(Width<D>{}) with the least D of 64, 128 and 256 that holds head_dim.
template <int D>
struct Width {
  static constexpr int value = D;
};
template <class Function>
void with_width(int64_t head_dim, Function f) {
  if (head_dim <= 64) return f(Width<64>{});
  if (head_dim <= 128) return f(Width<128>{});
  f(Width<256>{});
}

inline void check_head_dim(const char* op, int64_t head_dim) {
  if (head_dim < 0 || head_dim > kMaxHeadDim || head_dim % 8)
    throw std::invalid_argument(std::string(op) + ": head_dim: wanted a multiple of 8 up to 256 on CUDA, got " + std::to_string(head_dim));
}

// Whether all rows of a tensor of 16-bit elements start at multiples of 16 bytes; strides in elements, those of dimensions of
// size 1 left out or given as 0.
inline bool aligned_rows(const void* data, int64_t stride0, int64_t stride1 = 0, int64_t stride2 = 0) {
  return (reinterpret_cast<uintptr_t>(data) & 15) == 0 && ((stride0 | stride1 | stride2) & 7) == 0;
}

// Fills a tile of Rows rows with the help of `Threads` threads, of which this is number `thread`. row(r) gives the address of
// row r, or null for a row of zeros; columns from head_dim (a multiple of 8) on become zeros. When all rows are aligned to 16
// bytes the copies run in the background, as part of this thread's next copy_async_commit. Nothing else is ever read.
template <int D, int Rows, int Threads, class T, class Row>
__device__ __forceinline__ void load_tile(T* tile, Row row, int head_dim, bool aligned, int thread) {
  constexpr int kWords = D / 8;  // of 16 bytes, a row; a thread has the same word of every kStep-th row
  constexpr int kStep = Threads / kWords, kCount = Rows / kStep;
  static_assert(sizeof(T) == 2 && Threads % kWords == 0 && Rows % kStep == 0, "as many words for every thread");
  const int first = thread / kWords, column = thread % kWords * 8;
  const auto each_word = [&](int i, auto copy) {
    const int r = first + i * kStep;
    T* to = tile + r * kPitch<D> + column;
    if (const T* from = column < head_dim ? row(r) : nullptr)
      copy(to, from + column);
    else
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  };
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) each_word(i, [](T* to, const T* from) { copy_async_16(to, from, true); });
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i)
      each_word(i, [](T* to, const T* from) {
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e] = from[e];
      });
  }
}

// A warp's 16 query rows as operands of multiply_add: in registers, or left in shared memory where registers are short.
template <int D, class T>
struct QueryRows {
  static constexpr bool kHeld = D <= 128;
  uint32_t held[kHeld ? D / 16 : 1][4];
  const T* corner;  // this lane's row and column of the first 16 x 16 block

  // rows: the first of 16 rows of a tile.
  __device__ __forceinline__ explicit QueryRows(const T* rows) {
    const int lane = threadIdx.x % kWarp;
    corner = rows + lane % 16 * kPitch<D> + lane / 16 * 8;
    if constexpr (kHeld) {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) load_matrices(held[step], corner + step * 16);
    }
  }
  // Columns 16 step .. 16 step + 15.
  __device__ __forceinline__ void block(int step, uint32_t (&a)[4]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[step][i];
    } else {
      load_matrices(a, corner + step * 16);
    }
  }
};

// scores = q k^T of 16 query rows and Keys keys (a multiple of 16), the first of which is row 0 of `keys`. With g = lane / 4 and
// t = lane % 4, scores[n][i] is query row g + 8 (i / 2), key 8 n + 2 t + i % 2.
template <int D, int Keys, class T>
__device__ __forceinline__ void score_tile(float (&scores)[Keys / 8][4], const QueryRows<D, T>& q, const T* keys) {
  static_assert(Keys % 16 == 0, "whole pairs of matrices");
  const int lane = threadIdx.x % kWarp;
  const T* corner = keys + (lane / 16 * 8 + lane % 8) * kPitch<D> + lane / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < Keys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0.f;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[4];
    q.block(step, a);
#pragma unroll
    for (int n = 0; n < Keys / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, corner + n * 16 * kPitch<D> + step * 16);
      multiply_add(scores[2 * n], a, b[0], b[1], T{});
      multiply_add(scores[2 * n + 1], a, b[2], b[3], T{});
    }
  }
}

// Rounds two floats to T, as the halves of one operand of multiply_add.
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

}  // namespace dream
