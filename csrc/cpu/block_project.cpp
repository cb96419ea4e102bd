#include "dream/block_project.h"

#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/rotate.h"

namespace dream::DREAM_ISA {

// Heads `first` .. `first + heads` of all rows of `from` (rows, width) to their place.
template <class T>
static void place(const BlockProject& call, const T* from, int64_t width, int64_t first, int64_t heads, const void* norm, bool turn,
                  void* to, int64_t to_head, int64_t to_row) {
  const int64_t size = call.head_dim;
  Room<T> own(size);
  for (int64_t r = 0; r < call.rows; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      const T* x = from + r * width + (first + h) * size;
      T* y = static_cast<T*>(to) + h * to_head + r * to_row;
      if (norm) {
        rms_norm({x, norm, call.dtype, 1, size, size, call.eps, call.round_first, turn ? own.data : y});
        x = turn ? own.data : y;
      }
      if (turn)
        rotate(x, static_cast<const T*>(call.cos) + r * call.table_row, static_cast<const T*>(call.sin) + r * call.table_row, size, y);
      else if (x != y)
        memcpy(y, x, size * sizeof(T));
    }
}

template <class T>
static void project(const BlockProject& call) {
  const int64_t width = (call.q_heads + call.k_heads + call.v_heads) * call.head_dim;
  Room<T> normed(call.normed ? call.rows * call.in : 0), heads(call.rows * width);
  const T* x = static_cast<const T*>(call.x);
  int64_t x_row = call.x_row, column = 0;
  if (call.normed) {
    rms_norm({x, call.norm_weight, call.dtype, call.rows, call.in, x_row, call.eps, call.round_first, normed.data});
    x = normed.data, x_row = call.in;
  }
  for (int64_t i = 0; i < call.layer_count; ++i) {
    apply(call.layers[i], call.dtype, call.rows, call.in, x, x_row, heads.data + column, width, call.threads);
    column += call.layers[i].out;
  }
  const bool turn = call.cos != nullptr;
  place(call, heads.data, width, 0, call.q_heads, call.q_norm, turn, call.q, call.q_head, call.q_row);
  place(call, heads.data, width, call.q_heads, call.k_heads, call.k_norm, turn, call.k, call.k_head, call.k_row);
  place(call, heads.data, width, call.q_heads + call.k_heads, call.v_heads, nullptr, false, call.v, call.v_head, call.v_row);
}

int block_project(const BlockProject& call) {
  call.dtype == Dtype::f32 ? project<float>(call) : project<bf16>(call);
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, block_project, const BlockProject&)

void dream::block_project_cpu(const BlockProject& call) {
  if (call.rows > 0) block_project_dispatch(call);
}
#endif
