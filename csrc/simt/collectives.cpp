// Barriers and warp collectives.
#include <cstring>

#include "simt/block.h"

namespace simt {

int lane() { return static_cast<int>(current().linear % kWarp); }

static bool same(Caller a, Caller b) { return a.line == b.line && (a.file == b.file || !std::strcmp(a.file, b.file)); }

// ---- the block's barrier

static struct {
  unsigned arrived, generation;
  Votes votes, result;
} barrier;

void start_barrier() { barrier = {0, 0, {1, 0, 0}, {}}; }

void release_barrier_if_full() {
  Block& all = block();
  if (!barrier.arrived || barrier.arrived < all.alive) return;
  const Thread* first = nullptr;
  for (const Thread* t : all.threads) {
    if (t->state != State::at_barrier) continue;
    if (!first) first = t;
    if (same(t->caller, first->caller)) continue;
    threadIdx = t->index;
    fail(t->caller, "divergent barrier: other threads of the block wait at %s:%d", first->caller.file, first->caller.line);
  }
  if (all.alive != all.size()) fail(first->caller, "barrier after %u of %u threads have exited", all.size() - all.alive, all.size());
  barrier.result = barrier.votes;
  barrier.votes = {1, 0, 0};
  barrier.arrived = 0;
  ++barrier.generation;
  for (Thread* t : all.threads) t->state = State::ready;
}

Votes block_barrier(int predicate, Caller caller) {
  if (left_out(caller)) return {predicate != 0, predicate != 0, predicate != 0};
  Thread& self = current();
  // Two tokens in turn: a thread that leaves one barrier late must not see what others release at the next.
  char* const token = race::kWatched ? tokens().barrier(barrier.generation) : nullptr;
  race::release(token);
  {
    const AsScheduler bookkeeping(self.fiber);
    self.caller = caller;
    self.state = State::at_barrier;
    barrier.votes.all &= predicate != 0;
    barrier.votes.any |= predicate != 0;
    barrier.votes.count += predicate != 0;
    ++barrier.arrived;
    release_barrier_if_full();
  }
  wait();
  race::acquire(token);
  return barrier.result;
}

// ---- collectives of a warp

static Lane lanes[kMaxThreads];

// memcpy would be an access to the race detector.
static void copy_unseen(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<volatile unsigned char*>(to)[i] = static_cast<const volatile unsigned char*>(from)[i];
}

static bool all_arrived(const Thread& self) {
  const unsigned first = self.linear / kWarp * kWarp;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!(self.mask >> l & 1)) continue;
    if (first + l >= block().size()) fail(self.caller, "mask 0x%08x names lane %u, which does not exist", self.mask, l);
    const Thread& other = *block().threads[first + l];
    if (other.state == State::done) fail(self.caller, "mask 0x%08x names lane %u, which has exited", self.mask, l);
    if (other.state != State::at_collective) return false;
    const bool here = other.function == self.function && same(other.caller, self.caller);
    if (here && other.mask != self.mask)
      fail(self.caller, "lanes %u and %u give different masks, 0x%08x and 0x%08x", self.linear % kWarp, l, self.mask, other.mask);
    if (!here || other.parameter != self.parameter) return false;  // not yet wrong; a true mismatch ends as a deadlock
  }
  return true;
}

static void complete_if_full(const Thread& self) {
  if (!all_arrived(self)) return;
  const unsigned first = self.linear / kWarp * kWarp;
  for (unsigned l = 0; l < kWarp; ++l) lanes[first + l].active = self.mask >> l & 1;
  if (self.function) self.function(lanes + first, self.mask, self.parameter, self.caller);
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!(self.mask >> l & 1)) continue;
    Thread& other = *block().threads[first + l];
    if (race::kWatched && !self.function) {  // before any lane goes on and releases something newer to the token
      as(other.fiber);
      race::acquire(tokens().warp(self.linear, self.mask));
      as_scheduler();
    }
    other.state = State::ready;
  }
}

void check_exited_lanes(const Thread& exited) {
  const unsigned first = exited.linear / kWarp * kWarp;
  for (unsigned i = first; i < first + kWarp && i < block().size(); ++i) {
    const Thread& other = *block().threads[i];
    if (other.state == State::at_collective && other.mask >> exited.linear % kWarp & 1)
      fail(other.caller, "mask 0x%08x names lane %u, which has exited", other.mask, exited.linear % kWarp);
  }
}

void warp_collective(WarpFunction function, uint64_t parameter, unsigned mask, const void* in, size_t in_bytes, void* out,
                     size_t out_bytes, Caller caller) {
  Thread& self = current();
  if (!(mask >> self.linear % kWarp & 1)) fail(caller, "lane %u is not in its own mask 0x%08x", self.linear % kWarp, mask);
  copy_unseen(lanes[self.linear].in, in, in_bytes);
  {
    const AsScheduler bookkeeping(self.fiber);
    self.caller = caller, self.function = function, self.parameter = parameter, self.mask = mask;
    self.state = State::at_collective;
    complete_if_full(self);
  }
  wait();
  copy_unseen(out, lanes[self.linear].out, out_bytes);
}

// Of all collectives only __syncwarp orders memory, as in CUDA's memory model.
void warp_barrier(unsigned mask, Caller caller) {
  if (left_out(caller)) return;
  if (race::kWatched && mask) race::release(tokens().warp(current().linear, mask));
  warp_collective(nullptr, 0, mask, nullptr, 0, nullptr, 0, caller);
}

template <class T>
static T given(const Lane& lane, size_t offset = 0) {
  T value;
  std::memcpy(&value, lane.in + offset, sizeof value);
  return value;
}

template <class T>
static void give(Lane& lane, T value) {  // what a lane outside the mask was given earlier may not have been fetched yet
  if (lane.active) std::memcpy(lane.out, &value, sizeof value);
}

struct ShuffleInput {
  uint64_t value;
  int source;
};

static void shuffle_lanes(Lane* all, unsigned mask, uint64_t parameter, Caller caller) {
  const auto mode = static_cast<Shuffle>(parameter & 255);
  const int width = static_cast<int>(parameter >> 8);
  if (width < 1 || width > 32 || (width & (width - 1))) fail(caller, "shuffle width %d", width);
  for (int l = 0; l < 32; ++l) {
    if (!all[l].active) continue;
    const int source = given<ShuffleInput>(all[l]).source, segment = l & ~(width - 1), inside = l & (width - 1);
    int from = l;
    if (mode == Shuffle::index) from = segment + (source & (width - 1));
    if (mode == Shuffle::up && inside >= source) from = l - source;
    if (mode == Shuffle::down && inside + source < width) from = l + source;
    if (mode == Shuffle::butterfly && (inside ^ source) < width) from = segment + (inside ^ source);
    if (from < 0 || from > 31 || !(mask >> from & 1)) fail(caller, "lane %d shuffles from lane %d, outside the mask 0x%08x", l, from, mask);
    give(all[l], given<ShuffleInput>(all[from]).value);
  }
}

uint64_t shuffle(Shuffle mode, unsigned mask, uint64_t value, int source, int width, Caller caller) {
  const ShuffleInput in{value, source};
  uint64_t out;
  const uint64_t parameter = static_cast<uint64_t>(mode) | static_cast<uint64_t>(static_cast<unsigned>(width)) << 8;
  warp_collective(shuffle_lanes, parameter, mask, &in, sizeof in, &out, sizeof out, caller);
  return out;
}

static void ballot_lanes(Lane* all, unsigned, uint64_t, Caller) {
  unsigned votes = 0;
  for (int l = 0; l < 32; ++l)
    if (all[l].active && given<bool>(all[l])) votes |= 1u << l;
  for (int l = 0; l < 32; ++l) give(all[l], votes);
}

unsigned ballot(unsigned mask, bool predicate, Caller caller) {
  unsigned out;
  warp_collective(ballot_lanes, 0, mask, &predicate, sizeof predicate, &out, sizeof out, caller);
  return out;
}

static void match_lanes(Lane* all, unsigned, uint64_t, Caller) {
  for (int l = 0; l < 32; ++l) {
    unsigned equal = 0;
    for (int k = 0; k < 32; ++k)
      if (all[k].active && given<uint64_t>(all[k]) == given<uint64_t>(all[l])) equal |= 1u << k;
    give(all[l], equal);
  }
}

unsigned match_any(unsigned mask, uint64_t value, Caller caller) {
  unsigned out;
  warp_collective(match_lanes, 0, mask, &value, sizeof value, &out, sizeof out, caller);
  return out;
}

static uint32_t reduced(Reduction operation, uint32_t a, uint32_t b) {
  const auto x = static_cast<int32_t>(a), y = static_cast<int32_t>(b);
  switch (operation) {
    case Reduction::add: return a + b;
    case Reduction::min_signed: return x < y ? a : b;
    case Reduction::max_signed: return x > y ? a : b;
    case Reduction::min_unsigned: return a < b ? a : b;
    case Reduction::max_unsigned: return a > b ? a : b;
    case Reduction::bit_and: return a & b;
    case Reduction::bit_or: return a | b;
    case Reduction::bit_xor: return a ^ b;
  }
  return 0;
}

static void reduce_lanes(Lane* all, unsigned mask, uint64_t parameter, Caller) {
  const int first = __builtin_ctz(mask);
  auto value = given<uint32_t>(all[first]);
  for (int l = first + 1; l < 32; ++l)
    if (all[l].active) value = reduced(static_cast<Reduction>(parameter), value, given<uint32_t>(all[l]));
  for (int l = 0; l < 32; ++l) give(all[l], value);
}

uint32_t reduce(Reduction operation, unsigned mask, uint32_t value, Caller caller) {
  uint32_t out;
  warp_collective(reduce_lanes, static_cast<uint64_t>(operation), mask, &value, sizeof value, &out, sizeof out, caller);
  return out;
}

}  // namespace simt
