#include "dream/attention_mass.h"

#include <algorithm>

#include "cuda/launch_table.h"
#include "cuda/score_patch.cuh"

namespace dream {

// A tile is one patch a warp. A tile of 128 wide fp32 keys would take more than the 99 KB that some devices have.
template <class T, int D>
constexpr int kTileWarps = sizeof(T) == 4 && D > 128 ? kMassWarps / 2 : kMassWarps;
template <class T, int D>
constexpr int kTileKeys = kTileWarps<T, D> * kPatchKeys;
template <class T, int D>
constexpr int kTileThreads = kTileWarps<T, D> * kWarp;

// Of the keys of one row in one split.
struct PartialSums {
  float m, z;  // as RowSums
};

// The rows of all heads that read one key head count as its rows: row i is row i % rows of head kv_head x groups + i / rows.
struct MassLaunch {
  const void *q, *k;
  const int64_t* row_positions;
  PartialSums* partial;  // (kv_heads, splits, all_rows)
  float* mass;           // (kv_heads, keys)
  int64_t q_head, q_row, k_head, k_row;
  int32_t keys, rows, all_rows, groups, head_dim, splits, tiles_per_split;
  float scale;           // scores to base-2 exponents
  bool q_aligned, k_aligned;
};

template <class T, int D>
constexpr size_t kMassRowsShared = sizeof(T) * Patch<T, D>::kPitch * (Patch<T, D>::kRows + Patch<T, D>::kStages * kTileKeys<T, D>);
template <class T, int D>
constexpr size_t kMassKeysShared = sizeof(T) * Patch<T, D>::kPitch * (kTileKeys<T, D> + 2 * Patch<T, D>::kRows);

// Starts to fill a tile with the rows first .. of a key head; those past the end are zeros.
template <class T, int D>
__device__ __forceinline__ void load_rows(T* tile, const MassLaunch& p, int kv_head, int first) {
  const T* q = static_cast<const T*>(p.q) + int64_t{kv_head} * p.groups * p.q_head;
  Patch<T, D>::template load<Patch<T, D>::kRows, kTileThreads<T, D>>(
      tile, [&](int r) { return first + r < p.all_rows ? q + (first + r) / p.rows * p.q_head + (first + r) % p.rows * p.q_row : nullptr; },
      p.head_dim, p.q_aligned);
}

template <class T, int D>
__device__ __forceinline__ void load_keys(T* tile, const MassLaunch& p, int kv_head, int first) {
  const T* k = static_cast<const T*>(p.k) + kv_head * p.k_head;
  Patch<T, D>::template load<kTileKeys<T, D>, kTileThreads<T, D>>(
      tile, [&](int j) { return first + j < p.keys ? k + (first + j) * p.k_row : nullptr; }, p.head_dim, p.k_aligned);
}

// How many keys a row sees; nothing past the end of the rows.
__device__ __forceinline__ int visible_keys(const MassLaunch& p, int row) {
  if (row >= p.all_rows) return 0;
  const int64_t position = p.row_positions[row % p.rows];
  return position < 0 ? 0 : position >= p.keys ? p.keys : static_cast<int>(position) + 1;
}

__device__ __forceinline__ int warp_max(int x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The sums of kRows rows over the keys of one split. Lane r of every warp knows what row r sees.
template <class T, int D>
__global__ void __launch_bounds__(kTileThreads<T, D>, D <= 128 ? 2 : 1) attention_mass_rows_kernel(const MassLaunch p) {
  using P = Patch<T, D>;
  constexpr int kKeys = kTileKeys<T, D>, kWarps = kTileWarps<T, D>;
  SIMT_DYN_SHARED(memory);
  SIMT_SHARED(PartialSums, of_warps, kWarps * P::kRows);
  T* queries = reinterpret_cast<T*>(memory);
  T* tiles = queries + P::kRows * P::kPitch;
  const int first = blockIdx.x * P::kRows, split = blockIdx.y, kv_head = blockIdx.z;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  load_rows<T, D>(queries, p, kv_head, first);
  copy_async_commit();
  const int sees = lane < P::kRows ? visible_keys(p, first + lane) : 0;
  const int first_tile = split * p.tiles_per_split, last_tile = (warp_max(sees) + kKeys - 1) / kKeys;
  auto stream = stream_tiles<P::kStages>(min(last_tile - first_tile, p.tiles_per_split), [&](int t, int stage) {
    load_keys<T, D>(tiles + stage * kKeys * P::kPitch, p, kv_head, (first_tile + t) * kKeys);
  });
  stream.start(0);
  copy_async_wait<1>();
  __syncthreads();
  P patch(queries);
  RowSums sums[P::kRowsHere];
  int visible[P::kRowsHere];
#pragma unroll
  for (int r = 0; r < P::kRowsHere; ++r) visible[r] = __shfl_sync(kAllLanes, sees, P::row(r));
  stream.run([&](int t, int stage) {
    const int key = (first_tile + t) * kKeys + warp * kPatchKeys;
    patch.score(tiles + (stage * kKeys + warp * kPatchKeys) * P::kPitch);
#pragma unroll
    for (int r = 0; r < P::kRowsHere; ++r) {
      float x[P::kKeysHere];
#pragma unroll
      for (int c = 0; c < P::kKeysHere; ++c) x[c] = key + P::key(c) < visible[r] ? patch.at(r, c) * p.scale : kHiddenScore;
      sums[r].add(x);
    }
  });
#pragma unroll
  for (int r = 0; r < P::kRowsHere; ++r) {
    sums[r].template add_lanes<P::kRowLanes>();
    if (lane % P::kRowLanes == 0) of_warps[warp * P::kRows + P::row(r)] = {sums[r].m, sums[r].z};
  }
  __syncthreads();
  if (threadIdx.x >= P::kRows || first + static_cast<int>(threadIdx.x) >= p.all_rows) return;
  RowSums all;
  for (int w = 0; w < kWarps; ++w) all.add(RowSums{of_warps[w * P::kRows + threadIdx.x].m, of_warps[w * P::kRows + threadIdx.x].z});
  p.partial[(int64_t{kv_head} * p.splits + split) * p.all_rows + first + threadIdx.x] = {all.m, all.z};
}

struct RowWeight {
  int sees;
  float m, inverse;  // a key's mass is 2^(x - m) x inverse
};

__device__ __forceinline__ RowWeight row_weight(const MassLaunch& p, int kv_head, int row) {
  RowSums sums;
  const int sees = visible_keys(p, row);
  const PartialSums* partial = p.partial + int64_t{kv_head} * p.splits * p.all_rows + row;
#pragma unroll 4
  for (int s = 0; sees > 0 && s < p.splits; ++s) sums.add(RowSums{partial[int64_t{s} * p.all_rows].m, partial[int64_t{s} * p.all_rows].z});
  return {sees, sums.m, sees > 0 ? 1.f / sums.z : 0.f};
}

// The mass of a tile of keys from all rows of a key head, in the order of the rows.
template <class T, int D>
__global__ void __launch_bounds__(kTileThreads<T, D>, D <= 128 ? 2 : 1) attention_mass_keys_kernel(const MassLaunch p) {
  using P = Patch<T, D>;
  constexpr int kKeys = kTileKeys<T, D>;
  SIMT_DYN_SHARED(memory);
  T* keys = reinterpret_cast<T*>(memory);
  T* tiles = keys + kKeys * P::kPitch;
  const int tile_key = blockIdx.x * kKeys, kv_head = blockIdx.y;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, key = tile_key + warp * kPatchKeys;
  load_keys<T, D>(keys, p, kv_head, tile_key);
  auto stream = stream_tiles<2>((p.all_rows + P::kRows - 1) / P::kRows, [&](int t, int stage) {
    load_rows<T, D>(tiles + stage * P::kRows * P::kPitch, p, kv_head, t * P::kRows);
  });
  stream.start(0);
  const auto weight_of_lane = [&](int t) {
    return lane < P::kRows ? row_weight(p, kv_head, t * P::kRows + lane) : RowWeight{0, 0.f, 0.f};
  };
  RowWeight next = weight_of_lane(0);
  float mass[P::kKeysHere] = {};
  stream.run([&](int t, int stage) {
    const RowWeight weight = next;
    next = weight_of_lane(t + 1);
    if (warp_max(weight.sees) <= tile_key) return;
    P patch(tiles + stage * P::kRows * P::kPitch);
    patch.score(keys + warp * kPatchKeys * P::kPitch);
#pragma unroll
    for (int r = 0; r < P::kRowsHere; ++r) {
      const int visible = __shfl_sync(kAllLanes, weight.sees, P::row(r));
      const float m = __shfl_sync(kAllLanes, weight.m, P::row(r)), inverse = __shfl_sync(kAllLanes, weight.inverse, P::row(r));
#pragma unroll
      for (int c = 0; c < P::kKeysHere; ++c)
        mass[c] += key + P::key(c) < visible ? exp2_fast(patch.at(r, c) * p.scale - m) * inverse : 0.f;
    }
  });
#pragma unroll
  for (int c = 0; c < P::kKeysHere; ++c) {
#pragma unroll
    for (int step = P::kRowLanes; step < kWarp; step *= 2) mass[c] += __shfl_xor_sync(kAllLanes, mass[c], step);
    if (lane < P::kRowLanes && key + P::key(c) < p.keys) p.mass[int64_t{kv_head} * p.keys + key + P::key(c)] = mass[c];
  }
}

// mass (keys) = of_heads (kv_heads, keys), summed in the order of the heads.
__global__ void __launch_bounds__(kMassSumThreads) attention_mass_sum_kernel(const float* of_heads, float* mass, int kv_heads, int keys) {
  const int key = blockIdx.x * kMassSumThreads + threadIdx.x;
  if (key >= keys) return;
  float sum = 0.f;
#pragma unroll 8
  for (int head = 0; head < kv_heads; ++head) sum += of_heads[int64_t{head} * keys + key];
  mass[key] = sum;
}

struct MassPlan {
  int64_t all_rows, row_tiles, splits, tiles_per_split;
  int64_t partial_bytes, mass_bytes;  // the workspace: partial sums, then the mass of each key head if there are several
};

static MassPlan plan(const AttentionMass& call) {
  MassPlan plan{};
  int64_t tile_rows = 0, tile_keys = 0;
  with_type(call.dtype, [&](auto type) {
    with_width(call.head_dim, [&](auto width) {
      tile_rows = Patch<decltype(type), decltype(width)::value>::kRows, tile_keys = kTileKeys<decltype(type), decltype(width)::value>;
    });
  });
  const int64_t tiles = std::max<int64_t>(ceil_div(call.keys, tile_keys), 1);
  plan.all_rows = call.heads / call.kv_heads * call.rows;
  plan.row_tiles = ceil_div(plan.all_rows, tile_rows);
  const int64_t wanted = ceil_div(kMassBlocks, std::max<int64_t>(plan.row_tiles * call.kv_heads, 1));
  plan.tiles_per_split = ceil_div(tiles, std::min<int64_t>({wanted, tiles, kMassSplits}));
  plan.splits = ceil_div(tiles, plan.tiles_per_split);
  plan.partial_bytes = round_up(call.kv_heads * plan.splits * plan.all_rows * static_cast<int64_t>(sizeof(PartialSums)), 16);
  plan.mass_bytes = call.kv_heads > 1 ? call.kv_heads * call.keys * static_cast<int64_t>(sizeof(float)) : 0;
  return plan;
}

int64_t attention_mass_workspace(const AttentionMass& call) {
  const MassPlan sizes = plan(call);
  return sizes.partial_bytes + sizes.mass_bytes;
}

template <class T, int D>
static void prepare_both() {
  prepare(attention_mass_rows_kernel<T, D>, kMassRowsShared<T, D>), prepare(attention_mass_keys_kernel<T, D>, kMassKeysShared<T, D>);
}
template <class T>
static void prepare_widths() {
  prepare_both<T, 64>(), prepare_both<T, 128>(), prepare_both<T, 256>();
}
static const Prepared prepared([] {
  prepare_widths<float>(), prepare_widths<__nv_bfloat16>(), prepare_widths<__half>();
  prepare(attention_mass_sum_kernel);
});

template <class T, int D>
static void launch_both(const MassLaunch& params, const MassPlan& sizes, int kv_heads, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(sizes.row_tiles), static_cast<unsigned>(sizes.splits), kv_heads);
  if (sizes.row_tiles > 0) {
    SIMT_LAUNCH((attention_mass_rows_kernel<T, D>), rows, dim3((kTileThreads<T, D>)), (kMassRowsShared<T, D>), stream, params);
    check_launch("attention_mass");
  }
  const dim3 keys(static_cast<unsigned>(ceil_div(params.keys, kTileKeys<T, D>)), kv_heads);
  SIMT_LAUNCH((attention_mass_keys_kernel<T, D>), keys, dim3((kTileThreads<T, D>)), (kMassKeysShared<T, D>), stream, params);
  check_launch("attention_mass");
}

void attention_mass_cuda(const AttentionMass& call, int device, void* stream) {
  check_head_dim("attention_mass", call.head_dim);
  if (call.keys == 0) return;
  const OnDevice current(device);
  const MassPlan sizes = plan(call);
  MassLaunch params{};
  params.q = call.q, params.k = call.k, params.row_positions = call.row_positions;
  params.partial = static_cast<PartialSums*>(call.workspace);
  params.mass = call.kv_heads > 1 ? reinterpret_cast<float*>(static_cast<char*>(call.workspace) + sizes.partial_bytes) : call.mass;
  params.q_head = call.heads > 1 ? call.q_head_stride : 0, params.q_row = call.rows > 1 ? call.q_row_stride : 0;
  params.k_head = call.kv_heads > 1 ? call.k_head_stride : 0, params.k_row = call.keys > 1 ? call.k_row_stride : 0;
  params.keys = static_cast<int32_t>(call.keys), params.rows = static_cast<int32_t>(call.rows);
  params.all_rows = static_cast<int32_t>(sizes.all_rows), params.groups = static_cast<int32_t>(call.heads / call.kv_heads);
  params.head_dim = static_cast<int32_t>(call.head_dim), params.splits = static_cast<int32_t>(sizes.splits);
  params.tiles_per_split = static_cast<int32_t>(sizes.tiles_per_split), params.scale = call.scale * kLog2E;
  params.q_aligned = aligned_rows(call.q, params.q_head, params.q_row);
  params.k_aligned = aligned_rows(call.k, params.k_head, params.k_row);
  with_type(call.dtype, [&](auto type) {
    with_width(call.head_dim, [&](auto width) {
      launch_both<decltype(type), decltype(width)::value>(params, sizes, static_cast<int>(call.kv_heads),
                                                          static_cast<cudaStream_t>(stream));
    });
  });
  if (call.kv_heads == 1) return;
  SIMT_LAUNCH(attention_mass_sum_kernel, dim3(static_cast<unsigned>(ceil_div(call.keys, kMassSumThreads))), dim3(kMassSumThreads), 0,
              static_cast<cudaStream_t>(stream), params.mass, call.mass, static_cast<int>(call.kv_heads), params.keys);
  check_launch("attention_mass");
}

}  // namespace dream
