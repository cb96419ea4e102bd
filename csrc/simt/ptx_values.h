// How handlers read and write slots.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "simt/ptx.h"

namespace simt::ptx {

template <class T>
T get(const uint64_t* slots, uint32_t slot) {
  T value;
  std::memcpy(static_cast<void*>(&value), slots + slot, sizeof value);
  return value;
}

// Signed values fill the slot, so that a register wider than the type holds the same number.
template <class T>
void set(uint64_t* slots, uint32_t slot, T value) {
  uint64_t bits = 0;
  if constexpr (std::is_integral<T>::value)
    bits = static_cast<uint64_t>(static_cast<std::conditional_t<std::is_signed<T>::value, int64_t, uint64_t>>(value));
  else
    std::memcpy(&bits, &value, sizeof value);
  slots[slot] = bits;
}

// Where PTX's type names lead: f(T{}) for the C++ type, or null.
template <class Function>
Handler with_integer(const std::string& type, Function f) {
  if (type == "u32" || type == "b32") return f(uint32_t{});
  if (type == "s32") return f(int32_t{});
  if (type == "u64" || type == "b64") return f(uint64_t{});
  if (type == "s64") return f(int64_t{});
  if (type == "u16" || type == "b16") return f(uint16_t{});
  if (type == "s16") return f(int16_t{});
  if (type == "u8" || type == "b8") return f(uint8_t{});
  if (type == "s8") return f(int8_t{});
  return nullptr;
}

// 16-bit floats as PTX computes them: exactly, then rounded once. A product of two and the sum with a third is exact in double
// precision, except for sums too far apart to matter.
inline double wide(double x) { return x; }
inline double wide(float x) { return x; }
inline double wide(__half x) { return __half2float(x); }
inline double wide(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
T narrow(double x) { return static_cast<T>(x); }
template <>
inline __half narrow<__half>(double x) { return __double2half(x); }
template <>
inline __nv_bfloat16 narrow<__nv_bfloat16>(double x) { return __double2bfloat16(x); }

// ---- handlers of one operation, a function object

template <class T, class Operation>
const Instruction* unary(const Instruction& x, uint64_t* s) {
  set<T>(s, x.to[0], Operation()(get<T>(s, x.from[0])));
  return &x + 1;
}
template <class T, class Operation>
const Instruction* binary(const Instruction& x, uint64_t* s) {
  set<T>(s, x.to[0], Operation()(get<T>(s, x.from[0]), get<T>(s, x.from[1])));
  return &x + 1;
}
template <class T, class Operation>
const Instruction* ternary(const Instruction& x, uint64_t* s) {
  set<T>(s, x.to[0], Operation()(get<T>(s, x.from[0]), get<T>(s, x.from[1]), get<T>(s, x.from[2])));
  return &x + 1;
}

using Table = std::map<std::string, Handler>;

// One operation for several types: `name.u32` and so on.
template <class Operation, class... T>
void each_binary(Table& table, const std::string& name, std::initializer_list<const char*> types) {
  const char* const* type = types.begin();
  ((table[name + "." + *type++] = binary<T, Operation>), ...);
}
template <class Operation, class... T>
void each_unary(Table& table, const std::string& name, std::initializer_list<const char*> types) {
  const char* const* type = types.begin();
  ((table[name + "." + *type++] = unary<T, Operation>), ...);
}

inline Handler look_up(const Table& table, const Name& name) {
  const auto found = table.find(name.whole);
  return found == table.end() ? nullptr : found->second;
}

#define SIMT_OPERATION(Name, expression)                    \
  struct Name {                                        \
    template <class T>                                 \
    T operator()(T a, T b = T(), T c = T()) const {    \
      (void)b, (void)c;                                \
      return expression;                               \
    }                                                  \
  };

}  // namespace simt::ptx
