// What the two acceptance operators share.
#pragma once
#include <algorithm>
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

// Fills path, length and bonus of one sequence; `choose(node)` is the token after a node, asked for the nodes of the path only.
template <class Call, class Choose>
void walk(const Call& call, int64_t sequence, Choose choose) {
  const int64_t *tokens = call.tokens + sequence * call.nodes, *parents = call.parents + sequence * call.nodes;
  int64_t *path = call.path + sequence * call.nodes, last = 0, length = 1, chosen = choose(int64_t{0});
  path[0] = 0;
  // Children come after their parent, so one pass over the nodes finds the whole path.
  for (int64_t i = 1; i < call.nodes; ++i)
    if (parents[i] == last && tokens[i] == chosen) {
      path[length++] = last = i;
      chosen = choose(i);
    }
  call.length[sequence] = length;
  call.bonus[sequence] = chosen;
  std::fill(path + length, path + call.nodes, int64_t{-1});
}

}  // namespace dream
