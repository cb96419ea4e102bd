// Comparisons, selections and moves.
#include <algorithm>
#include <cmath>

#include "simt/ptx_values.h"

namespace simt::ptx {

// ---- comparisons: p = (a ? b) and / or / xor c; q = the same of !(a ? b)

enum Join { kNone, kAnd, kOr, kXor };

template <class T, class Comparison>
const Instruction* compare(const Instruction& x, uint64_t* s) {
  const bool holds = Comparison()(get<T>(s, x.from[0]), get<T>(s, x.from[1]));
  const bool third = x.variant != kNone && (s[x.from[2]] & 1);
  const auto join = [&](bool value) {
    return x.variant == kAnd ? value && third : x.variant == kOr ? value || third : x.variant == kXor ? value != third : value;
  };
  set<uint8_t>(s, x.to[0], join(holds));
  if (x.results == 2) set<uint8_t>(s, x.to[1], join(!holds));
  return &x + 1;
}

#define COMPARISON(Name, expression)     \
  struct Name {                          \
    template <class T>                   \
    bool operator()(T x, T y) const {    \
      const auto a = value(x), b = value(y); \
      return expression;                 \
    }                                    \
  };
template <class T>
std::enable_if_t<std::is_integral<T>::value, T> value(T x) { return x; }
template <class T>
std::enable_if_t<!std::is_integral<T>::value, double> value(T x) { return wide(x); }
COMPARISON(Equal, a == b)
COMPARISON(Less, a < b)
COMPARISON(LessEqual, a <= b)
COMPARISON(Greater, a > b)
COMPARISON(GreaterEqual, a >= b)
COMPARISON(Unequal, a != b)
COMPARISON(Ordered, !(std::isnan(static_cast<double>(a)) || std::isnan(static_cast<double>(b))))
COMPARISON(Unordered, std::isnan(static_cast<double>(a)) || std::isnan(static_cast<double>(b)))
COMPARISON(OrderedUnequal, a < b || a > b)
COMPARISON(UnorderedEqual, !(a < b || a > b))
COMPARISON(UnorderedLess, !(a >= b))
COMPARISON(UnorderedLessEqual, !(a > b))
COMPARISON(UnorderedGreater, !(a <= b))
COMPARISON(UnorderedGreaterEqual, !(a < b))
#undef COMPARISON

template <class T>
Handler comparison(const std::string& name) {
  if (name == "eq") return compare<T, Equal>;
  if (name == "ne") return std::is_integral<T>::value ? compare<T, Unequal> : compare<T, OrderedUnequal>;
  if (name == "lt" || name == "lo") return compare<T, Less>;
  if (name == "le" || name == "ls") return compare<T, LessEqual>;
  if (name == "gt" || name == "hi") return compare<T, Greater>;
  if (name == "ge" || name == "hs") return compare<T, GreaterEqual>;
  if (std::is_integral<T>::value) return nullptr;
  if (name == "num") return compare<T, Ordered>;
  if (name == "nan") return compare<T, Unordered>;
  if (name == "equ") return compare<T, UnorderedEqual>;
  if (name == "neu") return compare<T, Unequal>;
  if (name == "ltu") return compare<T, UnorderedLess>;
  if (name == "leu") return compare<T, UnorderedLessEqual>;
  if (name == "gtu") return compare<T, UnorderedGreater>;
  if (name == "geu") return compare<T, UnorderedGreaterEqual>;
  return nullptr;
}

static Handler any_comparison(const Name& name, Instruction& x) {  // setp.lt.and.s32
  static const std::map<std::string, int> joins = {{"and", kAnd}, {"or", kOr}, {"xor", kXor}};
  if (name.modifiers.size() == 3) {
    const auto join = joins.find(name.modifiers[1]);
    if (join == joins.end()) return nullptr;
    x.variant = join->second;
  } else if (name.modifiers.size() != 2) {
    return nullptr;
  }
  const std::string &how = name.modifiers[0], &type = name.type();
  if (type == "f32") return comparison<float>(how);
  if (type == "f64") return comparison<double>(how);
  if (type == "f16") return comparison<__half>(how);
  if (type == "bf16") return comparison<__nv_bfloat16>(how);
  return with_integer(type, [&](auto zero) { return comparison<decltype(zero)>(how); });
}

// ---- moves

static const Instruction* move(const Instruction& x, uint64_t* s) {
  s[x.to[0]] = s[x.from[0]];
  return &x + 1;
}
static const Instruction* move_address(const Instruction& x, uint64_t* s) {
  s[x.to[0]] = s[x.base] + static_cast<uint64_t>(x.offset);
  return &x + 1;
}
static const Instruction* pack(const Instruction& x, uint64_t* s) {  // variant: bits of a part
  uint64_t out = 0;
  for (int i = 0; i < x.sources; ++i) out |= (s[x.from[i]] & ((uint64_t{1} << x.variant) - 1)) << i * x.variant;
  s[x.to[0]] = out;
  return &x + 1;
}
static const Instruction* unpack(const Instruction& x, uint64_t* s) {
  const uint64_t in = s[x.from[0]];
  for (int i = 0; i < x.results; ++i) s[x.to[i]] = in >> i * x.variant & ((uint64_t{1} << x.variant) - 1);
  return &x + 1;
}
static const Instruction* select(const Instruction& x, uint64_t* s) {
  s[x.to[0]] = s[x.from[s[x.from[2]] & 1 ? 0 : 1]];
  return &x + 1;
}

static Handler any_move(const Name& name, Instruction& x) {
  if (name.modifiers.size() != 1) return nullptr;
  if (x.addressed) return move_address;
  const int bits = name.type() == "b64" ? 64 : name.type() == "b32" ? 32 : name.type() == "b128" ? 128 : 0;
  if (x.results == 1 && x.sources == 1) return move;
  if (bits != 32 && bits != 64) return nullptr;
  x.variant = bits / std::max(x.results, x.sources);
  return x.results > 1 ? unpack : pack;
}

Handler choices(const Name& name, Instruction& x) {
  if (name.operation == "setp") return any_comparison(name, x);
  if (name.operation == "mov") return any_move(name, x);
  if (name.operation == "selp" && name.modifiers.size() == 1) return select;
  return nullptr;
}

}  // namespace simt::ptx
