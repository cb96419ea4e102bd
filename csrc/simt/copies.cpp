// cp.async: a thread's copies to shared memory, which it knows to be done only after a wait.
#include <cstring>

#include "simt/block.h"

namespace simt {

static void perform(const Copy& copy) {
  race::reads(copy.global, copy.valid_bytes);
  race::writes(copy.shared, copy.bytes);
  std::memcpy(copy.shared, copy.global, copy.valid_bytes);
  std::memset(static_cast<char*>(copy.shared) + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

static void perform(Thread& thread, std::vector<Copy>& copies) {
  for (const Copy& copy : copies) perform(copy);
  const AsScheduler bookkeeping(thread.fiber);
  copies.clear();
}

void copy_async(void* shared, const void* global, int bytes, int valid_bytes, Caller caller) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(shared) | (valid_bytes ? reinterpret_cast<uintptr_t>(global) : 0);
  if (addresses % static_cast<uintptr_t>(bytes))
    fail(caller, "cp.async of %d bytes is not aligned: shared %p, global %p", bytes, shared, global);
  ++stats().copies;
  const Copy copy{shared, global, bytes, valid_bytes};
  if (options().cp_async_eager) return perform(copy);
  // The hardware may copy at any moment from here to the wait. Accesses at both ends stand for all of them: what is unordered
  // with one of the moments between is unordered with one of the ends.
  race::reads(global, valid_bytes);
  race::writes(shared, bytes);
  const AsScheduler bookkeeping(current().fiber);
  current().open.push_back(copy);
}

void copy_async_commit(Caller caller) {
  if (left_out(caller)) return;
  Thread& self = current();
  const AsScheduler bookkeeping(self.fiber);
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

void copy_async_wait(int pending, Caller caller) {
  if (left_out(caller)) return;
  Thread& self = current();
  while (static_cast<int>(self.groups.size()) > pending) {
    perform(self, self.groups.front());
    const AsScheduler bookkeeping(self.fiber);
    self.groups.erase(self.groups.begin());
  }
}

void finish_copies(Thread& thread) {
  for (auto& group : thread.groups) perform(thread, group);
  perform(thread, thread.open);
  const AsScheduler bookkeeping(thread.fiber);
  thread.groups.clear();
}

}  // namespace simt
