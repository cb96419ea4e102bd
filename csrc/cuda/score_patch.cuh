// What the streaming statistics of attention share: a warp's patch of scores, tiles of rows that arrive while others are used,
// and the online sums of a softmax. Kernels are written once for all types; the types differ in how a patch is computed and in
// which rows and keys of it a thread holds.
#pragma once
#include "cuda/tile.cuh"

namespace dream {

constexpr int kPatchKeys = 32;

// Scores of kRows query rows and 32 keys. This thread holds rows row(0) .. row(kRowsHere - 1) and keys key(0) ..
// key(kKeysHere - 1) of them; the kRowLanes neighbouring lanes hold the same rows, and every kRowLanes-th lane the same keys.
// 16-bit types: tensor cores. Two sets of 16 rows share every load of keys, which halves what shared memory has to deliver.
template <class T, int D>
struct Patch {
  static constexpr int kRows = 32, kRowsHere = 4, kKeysHere = 8, kRowLanes = 4;
  static constexpr int kPitch = dream::kPitch<D>;  // elements from one row of a tile to the next
  static constexpr int kStages = D <= 128 ? 2 : 1;  // with two of 256, blocks would not fit the 99 KB of compute capability 8.6 or 8.9

  QueryRows<D, T> low, high;
  float sums[2][kPatchKeys / 8][4];

  // queries: the first of kRows rows of a tile.
  __device__ __forceinline__ explicit Patch(const T* queries) : low(queries), high(queries + 16 * kPitch) {}
  __device__ __forceinline__ static int row(int r) { return threadIdx.x % kWarp / 4 + 8 * r; }
  __device__ __forceinline__ static int key(int c) { return c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2; }
  __device__ __forceinline__ float& at(int r, int c) { return sums[r / 2][c / 2][r % 2 * 2 + c % 2]; }

  // keys: the first of 32 rows of a tile.
  __device__ __forceinline__ void score(const T* keys) {
    const int lane = threadIdx.x % kWarp;
    const T* corner = keys + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < kPatchKeys; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.f;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t a[2][4];
      low.block(step, a[0]), high.block(step, a[1]);
#pragma unroll
      for (int n = 0; n < kPatchKeys / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, corner + n * 16 * kPitch + step * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_add(sums[half][2 * n], a[half], b[0], b[1], T{});
          multiply_add(sums[half][2 * n + 1], a[half], b[2], b[3], T{});
        }
      }
    }
  }

  template <int Rows, int Threads, class Row>
  __device__ __forceinline__ static void load(T* tile, Row row, int head_dim, bool aligned) {
    load_tile<D, Rows, Threads>(tile, row, head_dim, aligned, threadIdx.x);
  }
};

// fp32: a lane multiplies one key with eight rows. A row of a tile takes 16 bytes more than a multiple of 128, so the keys that
// eight lanes read at once lie in different banks. One stage: shared memory would not hold two.
template <int D>
struct Patch<float, D> {
  static constexpr int kRows = 8, kRowsHere = 8, kKeysHere = 1, kRowLanes = kWarp;
  static constexpr int kPitch = D + 4;
  static constexpr int kStages = 1;

  const float* queries;
  float sums[kRows];

  __device__ __forceinline__ explicit Patch(const float* queries) : queries(queries) {}
  __device__ __forceinline__ static int row(int r) { return r; }
  __device__ __forceinline__ static int key(int) { return threadIdx.x % kWarp; }
  __device__ __forceinline__ float& at(int r, int) { return sums[r]; }

  __device__ __forceinline__ void score(const float* keys) {
    const float* mine = keys + threadIdx.x % kWarp * kPitch;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = 0.f;
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(mine + d);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(queries + r * kPitch + d);
        sums[r] += q.x * k.x, sums[r] += q.y * k.y, sums[r] += q.z * k.z, sums[r] += q.w * k.w;
      }
    }
  }

  // As load_tile.
  template <int Rows, int Threads, class Row>
  __device__ __forceinline__ static void load(float* tile, Row row, int head_dim, bool aligned) {
    constexpr int kWords = D / 4;
    static_assert(Rows * kWords % Threads == 0, "whole words for every thread");
#pragma unroll 4
    for (int word = threadIdx.x; word < Rows * kWords; word += Threads) {
      const int r = word / kWords, column = word % kWords * 4;
      float* to = tile + r * kPitch + column;
      const float* from = column < head_dim ? row(r) : nullptr;
      if (from == nullptr) {
        *reinterpret_cast<float4*>(to) = make_float4(0.f, 0.f, 0.f, 0.f);
      } else if (aligned) {
        copy_async_16(to, from + column, true);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = from[column + e];
      }
    }
  }
};

// Tiles 0 .. count - 1 in turn, tile t in stage t % Stages. load(t, stage) starts the copy of a tile.
template <int Stages, class Load>
struct TileStream {
  int count;
  Load load;

  __device__ __forceinline__ void start(int t) {
    if (t < count) load(t, t % Stages);
    copy_async_commit();
  }
  // Calls use(t, stage) for every tile; start(0) has been called. All threads of the block take part.
  template <class Use>
  __device__ __forceinline__ void run(Use use) {
    for (int t = 0; t < count; ++t) {
      copy_async_wait<0>();
      __syncthreads();  // tile t is there for all; with two stages, also: all are done with tile t - 1
      if (Stages > 1) start(t + 1);
      use(t, t % Stages);
      if (Stages == 1) {
        __syncthreads();  // all are done with the stage
        start(t + 1);
      }
    }
  }
};
template <int Stages, class Load>
__device__ __forceinline__ TileStream<Stages, Load> stream_tiles(int count, Load load) {
  return {count, load};
}

// The stand-in for a hidden key's score, and the maximum before the first key. Finite, because 0 times them has to be 0, and so
// far apart that no hidden key counts.
constexpr float kHiddenScore = -1e30f, kNoMaximum = -1e29f;

// Online sums of 2^(x - m): z of the powers, u of the powers times x - m. u costs nothing where it is not used.
struct RowSums {
  float m = kNoMaximum, z = 0.f, u = 0.f;

  __device__ __forceinline__ void raise(float maximum) {
    const float delta = m - maximum, shrink = exp2_fast(delta);
    u = (u + delta * z) * shrink;
    z *= shrink;
    m = maximum;
  }
  template <int Count>
  __device__ __forceinline__ void add(const float (&x)[Count]) {
    float maximum = x[0];
#pragma unroll
    for (int i = 1; i < Count; ++i) maximum = fmaxf(maximum, x[i]);
    if (maximum > m) raise(maximum);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float t = x[i] - m, e = exp2_fast(t);
      z += e;
      u += e * t;
    }
  }
  __device__ __forceinline__ void add(RowSums other) {
    if (other.m > m)
      raise(other.m);
    else
      other.raise(m);
    z += other.z, u += other.u;
  }
  // Over groups of `Lanes` neighbouring lanes.
  template <int Lanes>
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2)
      add(RowSums{__shfl_xor_sync(kAllLanes, m, step), __shfl_xor_sync(kAllLanes, z, step), __shfl_xor_sync(kAllLanes, u, step)});
  }
};

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

}  // namespace dream
