#include "dream/verify_tree.h"

#include <stdexcept>
#include <string>

namespace dream {

void verify_tree_cpu(VerifyTree& call) {
  for (int64_t i = 0; i < call.nodes; ++i) {
    const int64_t parent = call.parents[i];
    if (i == 0 ? parent != -1 : (parent < 0 || parent >= i))
      throw std::invalid_argument("verify_tree: parents: wanted " +
                                  (i == 0 ? std::string("-1") : "an index in [0, " + std::to_string(i) + ")") + " at " +
                                  std::to_string(i) + ", got " + std::to_string(parent));
  }
  int64_t last = 0;
  call.path[0] = 0;
  call.length = 1;
  // Children come after their parent, so one pass over the nodes finds the whole path.
  for (int64_t i = 1; i < call.nodes; ++i)
    if (call.parents[i] == last && call.tokens[i] == call.choices[last]) call.path[call.length++] = last = i;
  call.bonus = call.choices[last];
}

}  // namespace dream
