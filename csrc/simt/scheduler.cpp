#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "simt/block.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {

constexpr int kFailure = 86;  // exit status
constexpr size_t kUnpreparedShared = 48 * 1024;  // what a kernel may use without cudaFuncSetAttribute

Options& options() {
  static Options value;
  return value;
}
Stats& stats() {
  static Stats value;
  return value;
}
Interpreter& interpreter() {
  static Interpreter value = nullptr;
  return value;
}
Tokens& tokens() {
  static Tokens value;
  return value;
}
Block& block() {
  static Block value;
  return value;
}

static Thread* running = nullptr;
Thread& current() { return *running; }

static uint64_t random_state;
uint64_t random_word() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

void fail(Caller caller, const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  fprintf(stderr, "simt: %s:%d: block (%u,%u,%u) thread (%u,%u,%u): %s\n", caller.file, caller.line, blockIdx.x, blockIdx.y, blockIdx.z,
          threadIdx.x, threadIdx.y, threadIdx.z, text);
  fflush(stderr);
  _exit(kFailure);  // the fibers' stacks cannot be unwound
}

// ---- preparation

static std::map<const void*, size_t>& prepared() {
  static std::map<const void*, size_t> value;
  return value;
}

void prepare(const void* kernel, size_t shared_bytes) { prepared()[kernel] = shared_bytes; }

void check(const Launch& launch) {
  const dim3 grid = launch.grid, threads = launch.block;
  const uint64_t count = uint64_t{threads.x} * threads.y * threads.z;
  threadIdx = blockIdx = {0, 0, 0};
  if (!count || count > kMaxThreads || threads.z > 64) fail(launch.caller, "block (%u,%u,%u)", threads.x, threads.y, threads.z);
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffff)
    fail(launch.caller, "grid (%u,%u,%u)", grid.x, grid.y, grid.z);
  if (launch.shared_bytes > options().shared_limit)
    fail(launch.caller, "shared memory: %zu bytes, the limit is %zu", launch.shared_bytes, options().shared_limit);
  if (!options().prepared_only) return;
  const auto found = prepared().find(launch.kernel);
  if (found == prepared().end()) fail(launch.caller, "this kernel was never prepared: its first launch could not be captured in a graph");
  if (launch.shared_bytes > std::max(found->second, kUnpreparedShared))
    fail(launch.caller, "shared memory: %zu bytes, prepared for %zu", launch.shared_bytes, found->second);
}

// ---- threads

void wait() { leave(running->fiber, false); }

static struct {
  void (*entry)(void*);
  void* argument;
} work;

static void thread_main() {
  Thread& self = current();
  arrived(self.fiber);
  race::acquire(&tokens().launched);
  work.entry(work.argument);
  finish_copies(self);
  race::release(&tokens().finished);
  {
    const AsScheduler bookkeeping(self.fiber);
    self.state = State::done;
    --block().alive;
    release_barrier_if_full();
    check_exited_lanes(self);
  }
  leave(self.fiber, true);
  abort();
}

[[noreturn]] static void report_deadlock() {
  const Block& all = block();
  std::string text;
  const Thread *first = nullptr, *last = nullptr;
  for (const Thread* t : all.threads) {
    if (t->state == State::done) continue;
    if (!first) first = t;
    const bool another = !last || t->linear % kWarp == 0 || t->caller.line != last->caller.line || t->state != last->state;
    if (another && text.size() < 900) {
      char line[256];
      snprintf(line, sizeof line, "\n  threads %u..: %s at %s:%d, mask 0x%08x", t->linear,
               t->state == State::at_barrier ? "barrier" : "warp collective", t->caller.file, t->caller.line,
               t->state == State::at_barrier ? 0 : t->mask);
      text += line;
    }
    last = t;
  }
  threadIdx = first->index;
  fail(first->caller, "deadlock: threads wait for each other; %u have exited%s", all.size() - all.alive, text.c_str());
}

// Runs the threads of the block at work, each until it waits, until all are done.
static void run_threads(std::vector<Thread*>& order) {
  while (block().alive) {
    if (options().schedule == 2)
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_word() % i]);
    bool progress = false;
    for (Thread* thread : order) {
      if (thread->state != State::ready) continue;
      progress = true;
      running = thread;
      threadIdx = thread->index;
      enter(thread->fiber);
    }
    if (!progress) report_deadlock();
  }
}

// ---- launches

// For the race detector a fiber is one thread for the whole run, and making one for each CUDA thread would be slow. Three groups
// of fibers serve the blocks in turn: blocks of different groups are unordered, so that races between blocks are seen.
constexpr unsigned kGroups = race::kWatched ? 3 : 1;

static Thread& pooled(unsigned group, unsigned thread) {
  static std::vector<Thread*> pool[kGroups];  // never freed: the sanitizers know their stacks
  while (pool[group].size() <= thread) pool[group].push_back(new Thread());
  return *pool[group][thread];
}

static void start_block(uint64_t number, unsigned group) {
  blockIdx = {unsigned(number % gridDim.x), unsigned(number / gridDim.x % gridDim.y), unsigned(number / gridDim.x / gridDim.y)};
  Block& all = block();
  all.alive = all.size();
  start_barrier();
  if (race::kWatched) tokens().of_block = std::make_unique<Memory>(kWarp + kMaxThreads);
  race::release(&tokens().launched);
  for (unsigned i = 0; i < all.size(); ++i) {
    Thread& thread = pooled(group, i);
    all.threads[i] = &thread;
    thread.linear = i;
    thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    thread.state = State::ready;
    start(thread.fiber, thread_main);
    if (race::kWatched) {
      char name[64];
      snprintf(name, sizeof name, "block (%u,%u,%u) thread %u", blockIdx.x, blockIdx.y, blockIdx.z, i);
      race::name(thread.fiber.race, name);
    }
  }
}

void run(const Launch& launch, void (*entry)(void*), void* argument) {
  gridDim = launch.grid, blockDim = launch.block;
  work = {entry, argument};
  random_state = options().seed * 0x9E3779B97F4A7C15u + 88172645463325252u;
  use_scheduler_thread();
  block().threads.resize(blockDim.x * blockDim.y * blockDim.z);
  std::vector<uint64_t> blocks(uint64_t{gridDim.x} * gridDim.y * gridDim.z);
  for (uint64_t i = 0; i < blocks.size(); ++i) blocks[i] = options().schedule == 1 ? blocks.size() - 1 - i : i;
  for (uint64_t i = blocks.size(); options().schedule == 2 && i > 1; --i) std::swap(blocks[i - 1], blocks[random_word() % i]);
  for (uint64_t i = 0; i < blocks.size(); ++i) {
    start_shared(launch);
    start_block(blocks[i], static_cast<unsigned>(i % kGroups));
    std::vector<Thread*> order = block().threads;
    if (options().schedule == 1) std::reverse(order.begin(), order.end());
    run_threads(order);
    end_shared();
  }
  race::acquire(&tokens().finished);
  stats().launches += 1, stats().blocks += blocks.size(), stats().threads += blocks.size() * block().size();
}

// ---- the places of synchronisation

static std::vector<Caller> sites;

static struct {
  Caller site;
  bool left_out;
} recent[1024];  // most calls find themselves here

static std::string name_of(Caller caller) {
  const char* slash = std::strrchr(caller.file, '/');
  return std::string(slash ? slash + 1 : caller.file) + ":" + std::to_string(caller.line);
}

bool left_out(Caller caller) {
  auto& known = recent[(static_cast<unsigned>(caller.line) + (reinterpret_cast<uintptr_t>(caller.file) >> 4)) % 1024];
  if (known.site.file != caller.file || known.site.line != caller.line) {
    const bool left_out = name_of(caller) == options().without;  // by this thread: the string may be on its stack
    const AsScheduler bookkeeping(current().fiber);
    sites.push_back(caller);
    known = {caller, left_out};
  }
  return known.left_out;
}

std::vector<std::string> take_sites() {
  std::vector<std::string> names;
  for (const Caller& site : sites) names.push_back(name_of(site));
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  sites.clear();
  std::memset(recent, 0, sizeof recent);
  return names;
}

}  // namespace simt
