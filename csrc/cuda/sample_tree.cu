#include "dream/sample_tree.h"

#include "cuda/walk.cuh"

namespace dream {

struct SampleLaunch {
  const float *probabilities, *noise;
  int64_t batch_stride, row_stride, noise_batch_stride, noise_row_stride;
  const int64_t* depth;  // (batch, nodes)
  Choice* parts;         // (batch, nodes, splits)
  int64_t levels;
  int32_t vocab;
};

// A quotient p / e cannot round to more than `high` when p < high * kLess * e: kLess outweighs the roundings of the two products
// and of the quotient, and among products without all their bits the next smaller p is a whole step away.
constexpr float kLess = 1 - 0x1p-21f;

// A row of probabilities with the noise beside it. Words are those of the probabilities; the noise may start elsewhere in its own.
struct NoisyRow {
  static constexpr int kItems = 4;
  struct Word {
    uint4 p, e;
  };
  struct Items {
    float p[kItems], e[kItems];
    unsigned inside;
  };

  __device__ __forceinline__ NoisyRow(const float* p, const float* e, int vocab) : p(p, vocab), e(e, vocab), vocab(vocab) {}

  __device__ __forceinline__ int first_id(int word) const { return p.first_id(word); }
  __device__ __forceinline__ bool whole(int word) const { return p.whole(word); }

  __device__ __forceinline__ Word load(int word) const {
    Word out{p.load(word), {}};
    if (p.lead == e.lead) {
      out.e = e.load(word);
    } else {
      const uint32_t* noise = reinterpret_cast<const uint32_t*>(e.row + first_id(word));
      out.e = {noise[0], noise[1], noise[2], noise[3]};
    }
    return out;
  }

  __device__ __forceinline__ Items unpack(const Word& word) const {
    Items out{{}, {}, 15u};
    const float *probability = reinterpret_cast<const float*>(&word.p), *noise = reinterpret_cast<const float*>(&word.e);
#pragma unroll
    for (int i = 0; i < kItems; ++i) out.p[i] = probability[i], out.e[i] = noise[i];
    return out;
  }

  __device__ __forceinline__ Items load_part(int word, bool wanted) const {
    const auto part = p.load_part(word, wanted);
    Items out{{}, {}, part.inside};
#pragma unroll
    for (int i = 0; i < kItems; ++i) out.p[i] = part.x[i], out.e[i] = part.inside >> i & 1 ? e.row[first_id(word) + i] : 1.f;
    return out;
  }

  VocabRow<float> p, e;
  int vocab;
};

// The greatest p / e of a thread's part of a row. Only an IEEE division rounds and ties as torch's does; most are ruled out by a
// product.
class Quotients {
 public:
  __device__ __forceinline__ void add(const NoisyRow::Items& items, int first) {
    bool open = false;
#pragma unroll
    for (int i = 0; i < NoisyRow::kItems; ++i) open |= !less(items.p[i], items.e[i]);
    if (!open) return;
#pragma unroll
    for (int i = 0; i < NoisyRow::kItems; ++i) {
      const float p = items.p[i], e = items.e[i];
      if (less(p, e)) continue;
      if (!(p >= 0 && p < kInfinity && e > 0)) {  // NaN fails every comparison
        refused_ = true;
        continue;
      }
      positive_ |= p > 0;
      const float quotient = __fdiv_rn(p, e);
      if (quotient > high_) high_ = quotient, low_ = high_ * kLess, best_ = first + i;
    }
  }

  // Where all quotients vanish but not all probabilities, the first token is right.
  __device__ __forceinline__ Choice choice() const { return {refused_ ? kGreatestOrder : order_of(high_), best_, positive_}; }

 private:
  __device__ __forceinline__ bool less(float p, float e) const { return p < low_ * e && e > 0; }  // also what is outside the row

  float high_ = -1, low_ = 0;
  int32_t best_ = kNoId;
  bool refused_ = false, positive_ = false;
};

// Grid (splits, nodes, batch).
__global__ void __launch_bounds__(kChoiceThreads, kChoiceBlocks) sample_rows_kernel(const SampleLaunch p) {
  SIMT_SHARED(Choice, shared, kChoiceWarps);
  const int64_t node = int64_t{blockIdx.z} * gridDim.y + blockIdx.y, depth = p.depth[node];
  const bool known = depth >= 0 && depth < p.levels;
  const NoisyRow row(p.probabilities + blockIdx.z * p.batch_stride + blockIdx.y * p.row_stride,
                      p.noise + blockIdx.z * p.noise_batch_stride + (known ? depth : 0) * p.noise_row_stride, p.vocab);
  const WordRange range = known ? split_words(row, blockIdx.x, gridDim.x) : WordRange{0, 0};
  Quotients quotients;
  for_words<kChoiceThreads, kRowPairsInFlight>(row, range, [&](const auto& items, int first) { quotients.add(items, first); });
  const Choice mine = known ? quotients.choice() : Choice{kGreatestOrder, kNoId, 0};
  store_choice(mine, shared, p.parts + node * gridDim.x + blockIdx.x);
}

static const Prepared prepared([] { prepare(sample_rows_kernel); });

int64_t sample_tree_workspace(const SampleTree& call) {
  const int64_t rows = call.batch * call.nodes;
  return rows == 0 ? 0 : rows * choice_splits(Dtype::f32, call.batch, call.nodes, call.vocab) * static_cast<int64_t>(sizeof(Choice));
}

void sample_tree_cuda(const SampleTree& call, int device, void* stream) {
  if (call.batch == 0) return;
  check_nodes("sample_tree", call.nodes);
  check_vocab("sample_tree", call.vocab);
  const OnDevice current(device);
  const int splits = choice_splits(Dtype::f32, call.batch, call.nodes, call.vocab);
  const dim3 grid(splits, static_cast<unsigned>(call.nodes), static_cast<unsigned>(call.batch));
  Choice* parts = static_cast<Choice*>(call.workspace);
  SIMT_LAUNCH(sample_rows_kernel, grid, dim3(kChoiceThreads), 0, static_cast<cudaStream_t>(stream),
              SampleLaunch{call.probabilities, call.noise, call.batch_stride, call.row_stride, call.noise_batch_stride,
                           call.noise_row_stride, call.depth, parts, call.levels, static_cast<int32_t>(call.vocab)});
  check_launch("sample_tree");
  walk_tree("sample_tree",
            {call.tokens, call.parents, nullptr, parts, static_cast<int32_t>(call.nodes), splits, true, call.path, call.length, call.bonus},
            call.batch, static_cast<cudaStream_t>(stream));
}

}  // namespace dream
