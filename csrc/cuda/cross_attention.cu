#include "dream/cross_attention.h"

#include "cuda/attention_core.cuh"

namespace dream {

void cross_attention_cuda(const CrossAttention& call, int device, void* stream) {
  launch_attention("cross_attention", call.attention, {call.q_norm, call.cos, call.sin, call.table_batch, call.table_row, call.eps}, device,
                   stream);
}

}  // namespace dream
