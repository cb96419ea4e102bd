#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "simt/block.h"

namespace simt {

constexpr size_t kStaticLimit = 48 * 1024;

// An exact heap block, which AddressSanitizer surrounds; a new mapping where the race detector must forget the last block.
static char* allocate(size_t bytes) {
  void* memory = nullptr;
  if (race::kWatched) {
    memory = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
  } else if (posix_memalign(&memory, 128, bytes ? bytes : 1)) {
    throw std::bad_alloc();
  }
  return static_cast<char*>(memory);
}

Memory::Memory(size_t bytes) : data(allocate(bytes)), bytes(bytes) {
  const int poison = options().poison;
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<char>(poison == 0 ? 0 : poison == 1 ? 0xff : poison == 3 ? 0x3c : random_word());
}

Memory::~Memory() {
  if (race::kWatched)
    munmap(data, bytes ? bytes : 1);
  else
    free(data);
}

struct Static {
  const void* key;
  std::unique_ptr<Memory> memory;
};

static std::vector<Static> statics;
static std::unique_ptr<Memory> dynamic;
static Caller launched_at;

static void check_limits() {
  size_t bytes = 0;
  for (const Static& each : statics) bytes += each.memory->bytes;
  if (bytes > kStaticLimit) fail(launched_at, "static shared memory: %zu bytes, the limit is %zu", bytes, kStaticLimit);
  bytes += dynamic->bytes;
  if (bytes > options().shared_limit) fail(launched_at, "shared memory: %zu bytes, the limit is %zu", bytes, options().shared_limit);
}

void start_shared(const Launch& launch) {
  launched_at = launch.caller;
  dynamic = std::make_unique<Memory>(launch.shared_bytes);
  check_limits();
}

void end_shared() {
  dynamic.reset();
  statics.clear();
  tokens().of_block.reset();
}

void* shared_static(const void* key, size_t bytes) {
  char* found = nullptr;
  {
    const AsScheduler bookkeeping(current().fiber);
    for (const Static& each : statics)
      if (each.key == key) found = each.memory->data;
    if (!found) {
      statics.push_back({key, std::make_unique<Memory>(bytes)});
      found = statics.back().memory->data;
      check_limits();
      race::release(&tokens().launched);
    }
  }
  race::acquire(&tokens().launched);  // the mapping is before its users
  return found;
}

void* shared_dynamic() { return dynamic->data; }
size_t shared_dynamic_bytes() { return dynamic->bytes; }

}  // namespace simt
