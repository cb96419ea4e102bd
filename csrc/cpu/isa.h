// Operators with heavy arithmetic are compiled once per instruction set, each in the namespace DREAM_ISA, and chosen at run
// time. Such a file includes no C++ library template: a copy compiled for a newer processor must never be the one that
// the linker keeps for everybody.
#pragma once

namespace dream {

enum class Isa { base, avx2, avx512, avx512vnni };

Isa isa();             // what the calls use: the best of the processor, or what use_isa set
Isa best_isa();        // the best that this build and this processor share
void use_isa(Isa isa); // for tests and measurements; never above best_isa()

}  // namespace dream

#ifdef DREAM_X86
#define DREAM_DISPATCH(Result, op, Call)          \
  namespace dream {                               \
  namespace avx2 { Result op(Call); }             \
  namespace avx512 { Result op(Call); }           \
  namespace avx512vnni { Result op(Call); }       \
  static Result op##_dispatch(Call call) {        \
    switch (isa()) {                              \
      case Isa::avx512vnni: return avx512vnni::op(call); \
      case Isa::avx512: return avx512::op(call);  \
      case Isa::avx2: return avx2::op(call);      \
      default: return base::op(call);             \
    }                                             \
  }                                               \
  }
#else
#define DREAM_DISPATCH(Result, op, Call) \
  namespace dream {                      \
  static Result op##_dispatch(Call call) { return base::op(call); } \
  }
#endif
