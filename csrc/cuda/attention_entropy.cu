#include "dream/attention_entropy.h"

#include "cuda/launch_table.h"
#include "cuda/score_patch.cuh"

namespace dream {

constexpr int kEntropyThreads = kEntropyWarps * kWarp;

struct EntropyLaunch {
  const void *q, *k;
  float* entropy;
  int64_t q_head, q_row, k_head, k_row;
  int32_t n, groups, head_dim;
  float scale;  // scores to base-2 exponents
  bool q_aligned, k_aligned;
};

template <class T, int D>
constexpr int kEntropyRows = kEntropyWarps * Patch<T, D>::kRows;

template <class T, int D>
constexpr size_t kEntropyShared = sizeof(T) * Patch<T, D>::kPitch * (kEntropyRows<T, D> + Patch<T, D>::kStages * kEntropyKeys);

// Adds one patch to the sums of this thread's rows. The first row and the first key of the patch matter where it may contain
// hidden keys.
template <class P>
__device__ __forceinline__ void add_patch(RowSums (&sums)[P::kRowsHere], P& patch, float scale, bool masked, int row, int key) {
#pragma unroll
  for (int r = 0; r < P::kRowsHere; ++r) {
    float x[P::kKeysHere];
#pragma unroll
    for (int c = 0; c < P::kKeysHere; ++c) {
      x[c] = patch.at(r, c) * scale;
      if (masked && key + P::key(c) > row + P::row(r)) x[c] = kHiddenScore;
    }
    sums[r].add(x);
  }
}

// A block has kEntropyRows rows of one head, a warp kRows of them. Blocks with the longest rows start first, so that the causal
// triangle leaves no multiprocessor with a long block at the end.
template <class T, int D>
__global__ void __launch_bounds__(kEntropyThreads, D <= 128 ? kEntropyBlocks : 1) attention_entropy_kernel(const EntropyLaunch p) {
  using P = Patch<T, D>;
  SIMT_DYN_SHARED(memory);
  T* queries = reinterpret_cast<T*>(memory);
  T* tiles = queries + kEntropyRows<T, D> * P::kPitch;
  const int head = blockIdx.x, first = (gridDim.y - 1 - blockIdx.y) * kEntropyRows<T, D>;
  const T* q = static_cast<const T*>(p.q) + head * p.q_head;
  const T* k = static_cast<const T*>(p.k) + head / p.groups * p.k_head;
  P::template load<kEntropyRows<T, D>, kEntropyThreads>(
      queries, [&](int r) { return first + r < p.n ? q + (first + r) * p.q_row : nullptr; }, p.head_dim, p.q_aligned);
  copy_async_commit();
  const int keys = min(first + kEntropyRows<T, D>, p.n);
  auto stream = stream_tiles<P::kStages>((keys + kEntropyKeys - 1) / kEntropyKeys, [&](int t, int stage) {
    P::template load<kEntropyKeys, kEntropyThreads>(
        tiles + stage * kEntropyKeys * P::kPitch,
        [&](int j) { return t * kEntropyKeys + j < keys ? k + (t * kEntropyKeys + j) * p.k_row : nullptr; }, p.head_dim, p.k_aligned);
  });
  stream.start(0);
  copy_async_wait<1>();
  __syncthreads();
  const int warp = threadIdx.x / kWarp, row = first + warp * P::kRows;
  P patch(queries + warp * P::kRows * P::kPitch);
  RowSums sums[P::kRowsHere];
  stream.run([&](int t, int stage) {
#pragma unroll 1
    for (int j = 0; j < kEntropyKeys; j += kPatchKeys) {
      const int key = t * kEntropyKeys + j;
      if (key >= row + P::kRows) break;
      patch.score(tiles + (stage * kEntropyKeys + j) * P::kPitch);
      if (key + kPatchKeys - 1 > row)
        add_patch(sums, patch, p.scale, true, row, key);
      else
        add_patch(sums, patch, p.scale, false, row, key);
    }
  });
#pragma unroll
  for (int r = 0; r < P::kRowsHere; ++r) {
    sums[r].template add_lanes<P::kRowLanes>();
    const int i = row + P::row(r);
    const float entropy = kLn2 * (log2f(sums[r].z) - sums[r].u / sums[r].z);
    if (threadIdx.x % P::kRowLanes == 0 && i < p.n) p.entropy[int64_t{head} * p.n + i] = entropy < 0.f ? 0.f : entropy;
  }
}

template <class T>
static void prepare_widths() {
  prepare(attention_entropy_kernel<T, 64>, kEntropyShared<T, 64>);
  prepare(attention_entropy_kernel<T, 128>, kEntropyShared<T, 128>);
  prepare(attention_entropy_kernel<T, 256>, kEntropyShared<T, 256>);
}
static const Prepared prepared([] { prepare_widths<float>(), prepare_widths<__nv_bfloat16>(), prepare_widths<__half>(); });

void attention_entropy_cuda(const AttentionEntropy& call, int device, void* stream) {
  check_head_dim("attention_entropy", call.head_dim);
  if (call.heads == 0 || call.n == 0) return;
  const OnDevice current(device);
  const int64_t groups = call.heads / call.kv_heads, q_head = call.heads > 1 ? call.q_head_stride : 0;
  const int64_t k_head = call.kv_heads > 1 ? call.k_head_stride : 0, q_row = call.n > 1 ? call.q_row_stride : 0;
  const int64_t k_row = call.n > 1 ? call.k_row_stride : 0;
  const EntropyLaunch params{call.q, call.k, call.entropy, q_head, q_row, k_head, k_row, static_cast<int32_t>(call.n),
                             static_cast<int32_t>(groups), static_cast<int32_t>(call.head_dim), call.scale * kLog2E,
                             aligned_rows(call.q, q_head, q_row), aligned_rows(call.k, k_head, k_row)};
  with_type(call.dtype, [&](auto type) {
    using T = decltype(type);
    with_width(call.head_dim, [&](auto width) {
      constexpr int D = decltype(width)::value;
      const dim3 grid(static_cast<unsigned>(call.heads), static_cast<unsigned>(ceil_div(call.n, kEntropyRows<T, D>)));
      SIMT_LAUNCH((attention_entropy_kernel<T, D>), grid, dim3(kEntropyThreads), (kEntropyShared<T, D>),
                  static_cast<cudaStream_t>(stream), params);
    });
  });
  check_launch("attention_entropy");
}

}  // namespace dream
