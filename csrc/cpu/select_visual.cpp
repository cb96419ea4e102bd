#include "dream/select_visual.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace dream {

void select_visual_cpu(const SelectVisual& call) {
  for (int64_t i = 0; i < call.v; ++i)
    if (std::isnan(call.scores[i]))
      throw std::invalid_argument("select_visual: scores: wanted numbers, got NaN at " + std::to_string(i));
  std::vector<int64_t> order(call.v);
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + call.keep, order.end(), [&](int64_t a, int64_t b) {
    return call.scores[a] > call.scores[b] || (call.scores[a] == call.scores[b] && a < b);
  });
  std::copy_n(order.begin(), call.keep, call.indices);
  std::sort(call.indices, call.indices + call.keep);
  for (int64_t t = 0; t < call.count; ++t) {
    const GatherRows& rows = call.tensors[t];
    for (int64_t i = 0; i < call.keep; ++i)
      std::memcpy(static_cast<char*>(rows.out) + i * rows.row_bytes,
                  static_cast<const char*>(rows.data) + call.indices[i] * rows.row_bytes, rows.row_bytes);
  }
}

}  // namespace dream
