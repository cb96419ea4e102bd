#include "dream/block_step.h"

#include <vector>

namespace dream {

void block_step_cpu(const BlockStep& call) {
  const int64_t rows = call.project.rows, width = call.merge.attended_size, head_dim = call.project.head_dim;
  const int64_t item = call.project.dtype == Dtype::f32 ? 4 : 2;
  std::vector<uint8_t> q(rows * width * item), attended(rows * width * item);
  BlockProject project = call.project;
  project.q = q.data(), project.q_head = rows * head_dim, project.q_row = head_dim;
  block_project_cpu(project);
  TreeAttention attention = call.attention;
  attention.q = q.data(), attention.q_head = rows * head_dim, attention.q_row = head_dim, attention.out = attended.data();
  tree_attention_cpu(attention);
  BlockMerge merge = call.merge;
  merge.attended = attended.data();
  block_merge_cpu(merge);
}

}  // namespace dream
