#include "dream/block_merge.h"

#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace dream::DREAM_ISA {

// y = x + branch, the branch scaled and rounded first where the block is gated. `size` elements.
template <class T>
static void join(const T* x, const T* branch, bool gated, float gate, int64_t size, T* y) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    floats more = load(branch + i);
    if (gated) more = rounded<T>(more * gate);
    store(y + i, load(x + i) + more);
  }
  for (; i < size; ++i) {
    T scaled;
    store_scalar(&scaled, scalar(branch + i) * gate);
    store_scalar(y + i, scalar(x + i) + (gated ? scalar(&scaled) : scalar(branch + i)));
  }
}

// x / (1 + e^-x), from e^-|x|, which cannot overflow.
DREAM_INLINE floats silu(floats x) {
  const floats e = vexp(x < 0.f ? x : -x);
  return x * (x < 0.f ? e : broadcast(1.f)) / (e + 1.f);
}

// act (size) = silu(gate) * up, both factors rounded.
template <class T>
static void swiglu(const T* gate, const T* up, int64_t size, T* act) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(act + i, rounded<T>(silu(load(gate + i))) * load(up + i));
  T tail[3][kLanes] = {};
  if (i == size) return;
  memcpy(tail[0], gate + i, (size - i) * sizeof(T));
  memcpy(tail[1], up + i, (size - i) * sizeof(T));
  swiglu(tail[0], tail[1], kLanes, tail[2]);
  memcpy(act + i, tail[2], (size - i) * sizeof(T));
}

template <class T>
static void merge(const BlockMerge& call) {
  const int64_t rows = call.rows, hidden = call.hidden, wide = call.intermediate;
  Room<T> branch(rows * hidden), normed(rows * hidden), gate_up(rows * 2 * wide), act(rows * wide);
  const T* x = static_cast<const T*>(call.x);
  T* y = static_cast<T*>(call.y);
  apply(call.output, call.dtype, rows, call.attended_size, static_cast<const T*>(call.attended), call.attended_size, branch.data,
        hidden, call.threads);
  join(x, branch.data, call.gated, call.attention_gate, rows * hidden, y);
  rms_norm({y, call.norm_weight, call.dtype, rows, hidden, hidden, call.eps, call.round_first, normed.data});
  for (int64_t i = 0; i < call.gate_up_count; ++i)
    apply(call.gate_up[i], call.dtype, rows, hidden, normed.data, hidden, gate_up.data + i * wide, 2 * wide, call.threads);
  for (int64_t r = 0; r < rows; ++r)
    swiglu(gate_up.data + r * 2 * wide, gate_up.data + r * 2 * wide + wide, wide, act.data + r * wide);
  apply(call.down, call.dtype, rows, wide, act.data, wide, branch.data, hidden, call.threads);
  join(y, branch.data, call.gated, call.mlp_gate, rows * hidden, y);
}

int block_merge(const BlockMerge& call) {
  call.dtype == Dtype::f32 ? merge<float>(call) : merge<bf16>(call);
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, block_merge, const BlockMerge&)

void dream::block_merge_cpu(const BlockMerge& call) {
  if (call.rows > 0) block_merge_dispatch(call);
}
#endif
