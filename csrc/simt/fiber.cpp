#include "simt/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(SIMT_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
void __asan_unpoison_memory_region(const volatile void* at, size_t bytes);
}
#endif

namespace simt {

constexpr size_t kStackBytes = 256 << 10;  // frames under AddressSanitizer are several times larger
constexpr size_t kPage = 4096;

static struct Scheduler {
  Context context;
  void* race = nullptr;
#if defined(SIMT_ASAN)
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
#endif
} scheduler;

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)

// Saves the registers that a call preserves, and returns on another stack. swapcontext would cost two system calls.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");

static void make_context(Context& context, char* stack, void (*function)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;                                // the return address of function, which keeps the stack aligned at its entry
  *--top = reinterpret_cast<void*>(function);      // where the first switch returns to
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}

static void switch_context(Context& from, Context& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

#else

static void make_context(Context& context, char* stack, void (*function)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = kStackBytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, function, 0);
}

static void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

#endif

void use_scheduler_thread() { scheduler.race = race::current(); }

void start(Fiber& fiber, void (*function)()) {
  if (!fiber.stack) {
    void* memory = mmap(nullptr, kPage + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, kPage, PROT_NONE);  // an overflow ends the program instead of another thread's stack
    fiber.stack = static_cast<char*>(memory) + kPage;
    fiber.race = race::create();
  }
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(fiber.stack, kStackBytes);  // the last thread never returned from its frames
  fiber.fake_stack = nullptr;
#endif
  make_context(fiber.context, fiber.stack, function);
}

void enter(Fiber& fiber) {
  race::become(fiber.race);
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(&scheduler.fake_stack, fiber.stack, kStackBytes);
#endif
  switch_context(scheduler.context, fiber.context);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(scheduler.fake_stack, nullptr, nullptr);
#endif
}

void leave(Fiber& fiber, [[maybe_unused]] bool for_ever) {
  race::become(scheduler.race);
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &fiber.fake_stack, scheduler.stack, scheduler.stack_bytes);
#endif
  switch_context(fiber.context, scheduler.context);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler.stack, &scheduler.stack_bytes);
#endif
}

void arrived(Fiber&) {
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_bytes);
#endif
}

AsScheduler::AsScheduler(const Fiber& fiber) : fiber_(fiber) { race::become(scheduler.race); }
void as(const Fiber& fiber) { race::become(fiber.race); }
void as_scheduler() { race::become(scheduler.race); }

}  // namespace simt
