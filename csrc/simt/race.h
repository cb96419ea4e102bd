// What the emulator tells ThreadSanitizer: which CUDA thread is at work, and what orders its accesses. Nothing in other builds.
// The emulator itself is compiled without -fsanitize=thread, so that its bookkeeping is no access.
#pragma once
#include <cstddef>

#if defined(SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* token);
void __tsan_release(void* token);
void __tsan_read_range(void* at, unsigned long bytes);
void __tsan_write_range(void* at, unsigned long bytes);
}
#endif

namespace simt::race {

#if defined(SIMT_TSAN)
constexpr bool kWatched = true;
inline void* create() { return __tsan_create_fiber(0); }
inline void* current() { return __tsan_get_current_fiber(); }
inline void name(void* fiber, const char* text) { __tsan_set_fiber_name(fiber, text); }
inline void become(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: a switch orders nothing
inline void acquire(void* token) { __tsan_acquire(token); }
inline void release(void* token) { __tsan_release(token); }
inline void reads(const void* at, size_t bytes) { __tsan_read_range(const_cast<void*>(at), bytes); }
inline void writes(void* at, size_t bytes) { __tsan_write_range(at, bytes); }
#else
constexpr bool kWatched = false;
inline void* create() { return nullptr; }
inline void* current() { return nullptr; }
inline void name(void*, const char*) {}
inline void become(void*) {}
inline void acquire(void*) {}
inline void release(void*) {}
inline void reads(const void*, size_t) {}
inline void writes(void*, size_t) {}
#endif

}  // namespace simt::race
