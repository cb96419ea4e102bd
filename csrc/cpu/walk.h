// What the two acceptance operators share.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace dream {

inline void check_parents(const char* op, const int64_t* parents, int64_t nodes) {
  for (int64_t i = 0; i < nodes; ++i)
    if (i == 0 ? parents[0] != -1 : (parents[i] < 0 || parents[i] >= i))
      throw std::invalid_argument(std::string(op) + ": parents: wanted " +
                                  (i == 0 ? std::string("-1") : "an index in [0, " + std::to_string(i) + ")") + " at " +
                                  std::to_string(i) + ", got " + std::to_string(parents[i]));
}

// Fills path, length and bonus; `choose(node)` is the token after a node, asked for the nodes of the path only.
template <class Call, class Choose>
void walk(Call& call, Choose choose) {
  int64_t last = 0;
  call.path[0] = 0;
  call.length = 1;
  call.bonus = choose(int64_t{0});
  // Children come after their parent, so one pass over the nodes finds the whole path.
  for (int64_t i = 1; i < call.nodes; ++i)
    if (call.parents[i] == last && call.tokens[i] == call.bonus) {
      call.path[call.length++] = last = i;
      call.bonus = choose(i);
    }
}

}  // namespace dream
