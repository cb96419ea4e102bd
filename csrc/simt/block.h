// The block at work: its threads and what they wait for. For the emulator's own files.
#pragma once
#include <memory>

#include "simt/fiber.h"
#include "simt/runtime.h"

namespace simt {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;

enum class State : uint8_t { ready, at_barrier, at_collective, done };

struct Copy {
  void* shared;
  const void* global;
  int bytes, valid_bytes;
};

struct Thread {
  Fiber fiber;
  State state;
  uint3 index;
  unsigned linear;
  Caller caller;  // of the synchronisation it waits at
  WarpFunction function;
  uint64_t parameter;
  unsigned mask;
  std::vector<Copy> open;                 // copies of no group yet
  std::vector<std::vector<Copy>> groups;  // oldest first
};

struct Block {
  std::vector<Thread*> threads;
  unsigned alive;

  unsigned size() const { return static_cast<unsigned>(threads.size()); }
};

Block& block();
Thread& current();
uint64_t random_word();

// Waits until somebody makes the current thread ready.
void wait();

void start_barrier();             // for a new block
void release_barrier_if_full();   // after an arrival, and after a thread's end
void check_exited_lanes(const Thread& exited);
void finish_copies(Thread& thread);

// ---- memory that lives as long as a block
struct Memory {
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* const data;
  const size_t bytes;
};
void start_shared(const Launch& launch);
void end_shared();

// ---- order between threads, for the race detector: what is released to a token is before what is acquired from it
struct Tokens {
  char launched;                        // the host's work, and the mapping of shared memory
  char finished;                        // the threads' work
  std::unique_ptr<Memory> of_block;     // a new mapping each time: blocks are unordered among themselves
  char* barrier(unsigned generation) const { return of_block->data + generation % 2; }
  char* warp(unsigned linear, unsigned mask) const { return of_block->data + kWarp + (linear & ~(kWarp - 1)) + __builtin_ctz(mask); }
};
Tokens& tokens();

// Whether this synchronisation is the one that options().without names. Notes that it was reached.
bool left_out(Caller caller);

}  // namespace simt
