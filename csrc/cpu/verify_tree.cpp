#include "dream/verify_tree.h"

#include "cpu/isa.h"
#include "cpu/lanes.h"

namespace dream {

struct Logits {
  const void* row;
  Dtype dtype;
  int64_t vocab;
};

}  // namespace dream

namespace dream::DREAM_ISA {

constexpr int64_t kBlock = 256;  // logits looked at together when hunting for a greater one

// As torch.argmax: the lowest index among equals, and NaN counts as the greatest number.
template <class T>
DREAM_INLINE int64_t argmax(const T* x, int64_t vocab) {
  float high = scalar(x);
  int64_t best = 0;
  for (int64_t i = 0; i < vocab && high == high; i += kBlock) {
    const int64_t end = i + kBlock < vocab ? i + kBlock : vocab;
    if (end - i == kBlock) {
      ints over = {};
      for (int64_t j = i; j < end; j += kLanes) over |= ~(ints)(load(x + j) <= high);
      if (!any(over)) continue;
    }
    for (int64_t j = i; j < end && high == high; ++j)
      if (!(scalar(x + j) <= high)) high = scalar(x + j), best = j;
  }
  return best;
}

int64_t best_token(const Logits& call) {
  return call.dtype == Dtype::f32 ? argmax(static_cast<const float*>(call.row), call.vocab)
                                  : argmax(static_cast<const bf16*>(call.row), call.vocab);
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
#include "cpu/walk.h"

DREAM_DISPATCH(int64_t, best_token, const Logits&)

void dream::verify_tree_cpu(const VerifyTree& call) {
  const int64_t bytes = call.dtype == Dtype::f32 ? 4 : 2;
  for (int64_t b = 0; b < call.batch; ++b) check_parents("verify_tree", call.parents + b * call.nodes, call.nodes);
  for (int64_t b = 0; b < call.batch; ++b) {
    const char* logits = static_cast<const char*>(call.logits) + b * call.batch_stride * bytes;
    walk(call, b, [&](int64_t node) {
      if (call.choices) return call.choices[b * call.nodes + node];
      return best_token_dispatch({logits + node * call.row_stride * bytes, call.dtype, call.vocab});
    });
  }
}
#endif
