// Every CPU operator over sizes at its boundaries, on guarded memory, by the contracts alone: for sanitizers.
//   operators [--isa base|avx2|avx512|avx512vnni] [OPERATOR ...]     prints the name of each operator it ran
#include <algorithm>
#include <iterator>

#include "cases.h"
#include "cpu/isa.h"

using namespace check;

struct Named {
  const char* name;
  void (*run)();
  bool every_isa;  // compiled once per instruction set, or calls what is
};

static const Named kOperators[] = {
    {"attention_entropy", attention_entropy, true},
    {"attention_mass", attention_mass, true},
    {"block_merge", block_merge, true},
    {"block_project", block_project, true},
    {"block_step", block_step, true},
    {"cross_attention", cross_attention, true},
    {"expand_tree", expand_tree, true},
    {"keep_path", keep_path, false},
    {"rank_tree", rank_tree, false},
    {"rms_norm", rms_norm, true},
    {"rounded_linear", rounded_linear, true},
    {"sample_tree", sample_tree, true},
    {"select_visual", select_visual, false},
    {"skinny_linear", skinny_linear, true},
    {"tree_attention", tree_attention, true},
    {"verify_tree", verify_tree, true},
};

int main(int count, char** words) {
  std::vector<std::string> wanted;
  int first = 0, last = static_cast<int>(dream::best_isa());
  const char* const isas[] = {"base", "avx2", "avx512", "avx512vnni"};
  for (int i = 1; i < count; ++i) {
    if (std::string(words[i]) != "--isa") {
      wanted.push_back(words[i]);
      continue;
    }
    const auto* found = ++i < count ? std::find(isas, std::end(isas), std::string(words[i])) : std::end(isas);
    if (found - isas > last) return std::fprintf(stderr, "--isa: this processor or build lacks it\n"), 2;
    first = last = static_cast<int>(found - isas);
  }
  for (const Named& op : kOperators) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), op.name) == wanted.end()) continue;
    for (int isa = first; isa <= (op.every_isa ? last : first); ++isa)
      for (lead() = 0; lead() < 2; ++lead()) {
        dream::use_isa(static_cast<dream::Isa>(isa));
        op.run();
      }
    std::printf("%s\n", op.name);
  }
  return failures() ? 1 : 0;
}
