// Branches, and what threads do together.
#include "simt/ptx_values.h"

namespace simt::ptx {

static const Instruction* branch(const Instruction& x, uint64_t*) { return x.target; }
static const Instruction* branch_by_table(const Instruction& x, uint64_t* s) { return x.targets.at(get<uint32_t>(s, x.from[0])); }
static const Instruction* end(const Instruction&, uint64_t*) { return nullptr; }
static const Instruction* trap(const Instruction& x, uint64_t*) { fail(x.place, "trap"); }

// ---- barriers

static const Instruction* barrier(const Instruction& x, uint64_t* s) {
  if (x.sources != 1 || s[x.from[0]] != 0) die("only barrier 0 of all threads is supported: " + x.text);
  block_barrier(0, x.place);
  return &x + 1;
}
enum class Vote { all, any, count, ballot, uniform };
static const Instruction* voting_barrier(const Instruction& x, uint64_t* s) {
  if (x.sources != 2 || s[x.from[0]] != 0) die("only barrier 0 of all threads is supported: " + x.text);
  const Votes votes = block_barrier(s[x.from[1]] & 1, x.place);
  const auto how = static_cast<Vote>(x.variant);
  set<int32_t>(s, x.to[0], how == Vote::all ? votes.all : how == Vote::any ? votes.any : votes.count);
  return &x + 1;
}
static const Instruction* barrier_of_warp(const Instruction& x, uint64_t* s) {
  warp_barrier(get<uint32_t>(s, x.from[0]), x.place);
  return &x + 1;
}

// ---- shuffles

struct ShuffleWords {
  uint32_t value, lane, limits;
};

// As in the PTX ISA: `limits` holds the highest lane of a segment, and its mask from bit 8 on. Gives the value, and whether the
// source was inside.
static void shuffle_lanes(Lane* lanes, unsigned mask, uint64_t mode, Caller place) {
  for (unsigned l = 0; l < 32; ++l) {
    if (!lanes[l].active) continue;
    ShuffleWords in;
    std::memcpy(&in, lanes[l].in, sizeof in);
    const uint32_t by = in.lane & 31, clamp = in.limits & 31, segment = in.limits >> 8 & 31;
    const uint32_t last = (l & segment) | (clamp & ~segment), first = l & segment;
    uint32_t from = l;
    bool inside = false;
    switch (static_cast<Shuffle>(mode)) {
      case Shuffle::index: from = first | (by & ~segment), inside = from <= last; break;
      case Shuffle::up: from = l - by, inside = static_cast<int>(from) >= static_cast<int>(last); break;
      case Shuffle::down: from = l + by, inside = from <= last; break;
      case Shuffle::butterfly: from = l ^ by, inside = from <= last; break;
    }
    if (!inside) from = l;
    if (!(mask >> from & 1)) fail(place, "lane %u shuffles from lane %u, outside the mask 0x%08x", l, from, mask);
    ShuffleWords source;
    std::memcpy(&source, lanes[from].in, sizeof source);
    const uint32_t out[2] = {source.value, inside};
    std::memcpy(lanes[l].out, out, sizeof out);
  }
}

static const Instruction* shuffle_words(const Instruction& x, uint64_t* s) {
  const ShuffleWords in{get<uint32_t>(s, x.from[0]), get<uint32_t>(s, x.from[1]), get<uint32_t>(s, x.from[2])};
  uint32_t out[2];
  warp_collective(shuffle_lanes, static_cast<uint64_t>(x.variant), get<uint32_t>(s, x.from[3]), &in, sizeof in, out, sizeof out, x.place);
  set(s, x.to[0], out[0]);
  if (x.results == 2) set(s, x.to[1], out[1]);
  return &x + 1;
}

// ---- votes, matches, reductions

static const Instruction* vote(const Instruction& x, uint64_t* s) {
  const auto mask = get<uint32_t>(s, x.from[1]);
  const uint32_t votes = ballot(mask, s[x.from[0]] & 1, x.place);
  switch (static_cast<Vote>(x.variant)) {
    case Vote::all: set<uint32_t>(s, x.to[0], votes == mask); break;
    case Vote::any: set<uint32_t>(s, x.to[0], votes != 0); break;
    case Vote::uniform: set<uint32_t>(s, x.to[0], votes == 0 || votes == mask); break;
    default: set(s, x.to[0], votes); break;
  }
  return &x + 1;
}
template <class T>
const Instruction* match(const Instruction& x, uint64_t* s) {
  set(s, x.to[0], match_any(get<uint32_t>(s, x.from[1]), get<T>(s, x.from[0]), x.place));
  return &x + 1;
}
static const Instruction* reduction(const Instruction& x, uint64_t* s) {
  set(s, x.to[0], reduce(static_cast<Reduction>(x.variant), get<uint32_t>(s, x.from[1]), get<uint32_t>(s, x.from[0]), x.place));
  return &x + 1;
}

// ---- tensor cores; variant: f16

static const Instruction* multiply_matrices(const Instruction& x, uint64_t* s) {
  uint32_t a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = get<uint32_t>(s, x.from[i]), d[i] = get<float>(s, x.from[6 + i]);
  multiply_add(d, a, get<uint32_t>(s, x.from[4]), get<uint32_t>(s, x.from[5]), x.variant, x.place);
  for (int i = 0; i < 4; ++i) set(s, x.to[i], d[i]);
  return &x + 1;
}

// ---- the names

static Handler reducing(const Name& name, Instruction& x) {  // redux.sync.add.s32
  const bool is_signed = name.type() == "s32";
  const std::map<std::string, Reduction> operations = {{"add", Reduction::add},
                                                       {"min", is_signed ? Reduction::min_signed : Reduction::min_unsigned},
                                                       {"max", is_signed ? Reduction::max_signed : Reduction::max_unsigned},
                                                       {"and", Reduction::bit_and},
                                                       {"or", Reduction::bit_or},
                                                       {"xor", Reduction::bit_xor}};
  if (name.modifiers.size() != 3 || (name.type() != "s32" && name.type() != "u32" && name.type() != "b32")) return nullptr;
  const auto found = operations.find(name.modifiers[1]);
  if (found == operations.end()) return nullptr;
  x.variant = static_cast<int>(found->second);
  return reduction;
}

Handler cooperation(const Name& name, Instruction& x) {
  const std::string& operation = name.operation;
  const auto with = [&](int variant, Handler handler) {
    x.variant = variant;
    return handler;
  };
  if (name.whole == "bra" || name.whole == "bra.uni") return branch;
  if (name.whole == "brx.idx" || name.whole == "brx.idx.uni") return branch_by_table;
  if (name.whole == "ret" || name.whole == "exit") return end;
  if (name.whole == "trap") return trap;
  if (name.whole == "bar.sync" || name.whole == "barrier.sync.aligned" || name.whole == "barrier.sync") return barrier;
  if (name.whole == "bar.warp.sync") return barrier_of_warp;
  if ((operation == "bar" || operation == "barrier") && name.has("red")) {
    if (name.has("popc")) return with(static_cast<int>(Vote::count), voting_barrier);
    return with(static_cast<int>(name.has("and") ? Vote::all : Vote::any), voting_barrier);
  }
  if (operation == "shfl" && name.modifiers.size() == 3 && name.modifiers[0] == "sync" && name.type() == "b32") {
    static const std::map<std::string, Shuffle> modes = {
        {"idx", Shuffle::index}, {"up", Shuffle::up}, {"down", Shuffle::down}, {"bfly", Shuffle::butterfly}};
    return with(static_cast<int>(modes.at(name.modifiers[1])), shuffle_words);
  }
  if (operation == "vote" && name.modifiers.size() == 3 && name.modifiers[0] == "sync") {
    static const std::map<std::string, Vote> kinds = {
        {"all", Vote::all}, {"any", Vote::any}, {"ballot", Vote::ballot}, {"uni", Vote::uniform}};
    return with(static_cast<int>(kinds.at(name.modifiers[1])), vote);
  }
  if (name.whole == "match.any.sync.b32") return match<uint32_t>;
  if (name.whole == "match.any.sync.b64") return match<uint64_t>;
  if (operation == "redux") return reducing(name, x);
  if (name.whole == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") return with(0, multiply_matrices);
  if (name.whole == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") return with(1, multiply_matrices);
  return nullptr;
}

}  // namespace simt::ptx
