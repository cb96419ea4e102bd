// Stacks of CUDA threads, and the switch between them and the scheduler. Sanitizers are told of every switch.
#pragma once
#include <cstddef>

#include "simt/race.h"

#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt {

struct Context {
#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
  void* stack_pointer;
#else
  ucontext_t saved;
#endif
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  void* race = nullptr;         // ThreadSanitizer's name for it
  void* fake_stack = nullptr;   // AddressSanitizer's
};

void use_scheduler_thread();                   // once before fibers are entered: this is where they leave to
void start(Fiber& fiber, void (*function)());  // the next enter() calls function, which never returns
void enter(Fiber& fiber);                      // from the scheduler; back at the fiber's leave()
void leave(Fiber& fiber, bool for_ever);
void arrived(Fiber& fiber);                    // first statement of function

// In its life accesses belong to the scheduler, not to this fiber: bookkeeping is never a race between CUDA threads.
class AsScheduler {
 public:
  explicit AsScheduler(const Fiber& fiber);
  ~AsScheduler() { race::become(fiber_.race); }

 private:
  const Fiber& fiber_;
};
void as(const Fiber& fiber);  // from the scheduler: the next accesses belong to this fiber, until as_scheduler()
void as_scheduler();

}  // namespace simt
