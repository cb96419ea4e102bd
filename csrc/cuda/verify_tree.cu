#include "dream/verify_tree.h"

#include "cuda/walk.cuh"

namespace dream {

struct ChooseLaunch {
  const void* logits;
  int64_t batch_stride, row_stride;
  Choice* parts;  // (batch, nodes, splits)
  int32_t vocab;
};

// As torch.argmax: the lowest id among equals, and NaN counts as the greatest number. Grid (splits, nodes, batch).
template <class T>
__global__ void __launch_bounds__(kChoiceThreads, kChoiceBlocks) choose_rows_kernel(const ChooseLaunch p) {
  SIMT_SHARED(Choice, shared, kChoiceWarps);
  const VocabRow<T> row(static_cast<const T*>(p.logits) + blockIdx.z * p.batch_stride + blockIdx.y * p.row_stride, p.vocab);
  float high = -kInfinity;
  int32_t id = 0;  // right for a row of -inf only, and outdone in any other
  for_words<kChoiceThreads, kRowWordsInFlight>(row, split_words(row, blockIdx.x, gridDim.x), [&](const auto& items, int first) {
    bool over = false;
#pragma unroll
    for (const auto x : items.x) over |= !(x <= high);
    if (!over) return;
#pragma unroll
    for (int e = 0; e < VocabRow<T>::kItems; ++e)
      if (!(items.x[e] <= high) && high == high) high = items.x[e], id = first + e;
  });
  Choice* out = p.parts + (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  store_choice({high == high ? order_of(high) : kGreatestOrder, id, 1}, shared, out);
}

static const Prepared prepared([] {
  prepare(choose_rows_kernel<float>), prepare(choose_rows_kernel<__nv_bfloat16>), prepare(choose_rows_kernel<__half>);
});

int64_t verify_tree_workspace(const VerifyTree& call) {
  if (!call.logits || call.batch == 0) return 0;
  return call.batch * call.nodes * choice_splits(call.dtype, call.batch, call.nodes, call.vocab) * static_cast<int64_t>(sizeof(Choice));
}

void verify_tree_cuda(const VerifyTree& call, int device, void* stream) {
  if (call.batch == 0) return;
  check_nodes("verify_tree", call.nodes);
  const OnDevice current(device);
  Walk walk{call.tokens, call.parents, call.choices, nullptr, static_cast<int32_t>(call.nodes), 0, false,
            call.path,   call.length,  call.bonus};
  if (!call.choices) {
    check_vocab("verify_tree", call.vocab);
    Choice* parts = static_cast<Choice*>(call.workspace);
    walk.parts = parts, walk.splits = choice_splits(call.dtype, call.batch, call.nodes, call.vocab);
    const dim3 grid(walk.splits, static_cast<unsigned>(call.nodes), static_cast<unsigned>(call.batch));
    with_type(call.dtype, [&](auto type) {
      SIMT_LAUNCH(choose_rows_kernel<decltype(type)>, grid, dim3(kChoiceThreads), 0, static_cast<cudaStream_t>(stream),
                  ChooseLaunch{call.logits, call.batch_stride, call.row_stride, parts, static_cast<int32_t>(call.vocab)});
    });
    check_launch("verify_tree");
  }
  walk_tree("verify_tree", walk, call.batch, static_cast<cudaStream_t>(stream));
}

}  // namespace dream
