#include "cpu/isa.h"

#include <atomic>
#include <stdexcept>

namespace dream {

Isa best_isa() {
#ifdef DREAM_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx2) return Isa::base;
  if (!avx512) return Isa::avx2;
  return __builtin_cpu_supports("avx512vnni") ? Isa::avx512vnni : Isa::avx512;
#else
  return Isa::base;
#endif
}

static std::atomic<Isa>& chosen() {
  static std::atomic<Isa> value{best_isa()};
  return value;
}

Isa isa() { return chosen().load(std::memory_order_relaxed); }

void use_isa(Isa wanted) {
  if (wanted > best_isa()) throw std::invalid_argument("use_isa: this processor lacks the instructions");
  chosen() = wanted;
}

}  // namespace dream
