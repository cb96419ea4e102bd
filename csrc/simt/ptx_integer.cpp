// Arithmetic and logic of integers.
#include <algorithm>
#include <limits>

#include "simt/ptx_values.h"

namespace simt::ptx {

// Unsigned integers wrap; registered for them alone where signs make no difference.
SIMT_OPERATION(Add, static_cast<T>(a + b))
SIMT_OPERATION(Subtract, static_cast<T>(a - b))
SIMT_OPERATION(Multiply, static_cast<T>(a * b))
SIMT_OPERATION(MultiplyAdd, static_cast<T>(a * b + c))
SIMT_OPERATION(And, static_cast<T>(a & b))
SIMT_OPERATION(Or, static_cast<T>(a | b))
SIMT_OPERATION(Xor, static_cast<T>(a ^ b))
SIMT_OPERATION(Not, static_cast<T>(~a))
SIMT_OPERATION(NotPredicate, static_cast<T>(!(a & 1)))
SIMT_OPERATION(Smaller, b < a ? b : a)
SIMT_OPERATION(Larger, a < b ? b : a)
SIMT_OPERATION(Negate, static_cast<T>(T{0} - a))
SIMT_OPERATION(Magnitude, static_cast<T>(a < 0 ? 0 - static_cast<std::make_unsigned_t<T>>(a) : a))
// By -1 the quotient of the least number would overflow.
SIMT_OPERATION(Quotient, b == 0 ? static_cast<T>(-1)
                         : std::is_signed<T>::value && b == static_cast<T>(-1) ? static_cast<T>(0 - static_cast<uint64_t>(a))
                                                                               : static_cast<T>(a / b))
SIMT_OPERATION(Remainder, b == 0 ? a : b == static_cast<T>(-1) && std::is_signed<T>::value ? T{0} : static_cast<T>(a % b))

// ---- operands of several types

template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, std::conditional_t<std::is_signed<T>::value, __int128, unsigned __int128>,
                                std::conditional_t<std::is_signed<T>::value, int64_t, uint64_t>>;
template <class T>
using Twice = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed<T>::value, int32_t, uint32_t>,
                                 std::conditional_t<std::is_signed<T>::value, int64_t, uint64_t>>;

// With a third operand, mad; its slot is kTrue otherwise, and not read.
template <class T>
const Instruction* multiply_wide(const Instruction& x, uint64_t* s) {
  using U = std::make_unsigned_t<Twice<T>>;
  const auto product = static_cast<U>(static_cast<Twice<T>>(get<T>(s, x.from[0])) * static_cast<Twice<T>>(get<T>(s, x.from[1])));
  set<Twice<T>>(s, x.to[0], static_cast<Twice<T>>(x.sources == 3 ? product + get<U>(s, x.from[2]) : product));
  return &x + 1;
}
template <class T>
const Instruction* multiply_high(const Instruction& x, uint64_t* s) {
  const auto product = static_cast<Wide<T>>(get<T>(s, x.from[0])) * static_cast<Wide<T>>(get<T>(s, x.from[1]));
  const T high = static_cast<T>(product >> (8 * sizeof(T)));
  set<T>(s, x.to[0], x.sources == 3 ? static_cast<T>(high + get<T>(s, x.from[2])) : high);
  return &x + 1;
}
template <class T>
const Instruction* shift_left(const Instruction& x, uint64_t* s) {
  const auto by = get<uint32_t>(s, x.from[1]);
  set<T>(s, x.to[0], by >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<uint64_t>(get<T>(s, x.from[0])) << by));
  return &x + 1;
}
template <class T>
const Instruction* shift_right(const Instruction& x, uint64_t* s) {  // past the end: zeros, or the sign
  const auto by = std::min<uint32_t>(get<uint32_t>(s, x.from[1]), 8 * sizeof(T) - 1);
  const bool gone = std::is_unsigned<T>::value && get<uint32_t>(s, x.from[1]) >= 8 * sizeof(T);
  set<T>(s, x.to[0], gone ? T{0} : static_cast<T>(get<T>(s, x.from[0]) >> by));
  return &x + 1;
}
template <class T>
const Instruction* extract_bits(const Instruction& x, uint64_t* s) {
  constexpr uint32_t kLast = 8 * sizeof(T) - 1;
  const uint32_t start = get<uint32_t>(s, x.from[1]) & 255, length = get<uint32_t>(s, x.from[2]) & 255;
  const uint64_t value = get<std::make_unsigned_t<T>>(s, x.from[0]);
  const uint64_t sign = std::is_signed<T>::value && length ? value >> std::min(start + length - 1, kLast) & 1 : 0;
  uint64_t out = 0;
  for (uint32_t i = 0; i <= kLast; ++i) out |= (i < length && start + i <= kLast ? value >> (start + i) & 1 : sign) << i;
  set<T>(s, x.to[0], static_cast<T>(out));
  return &x + 1;
}
template <class T>
const Instruction* insert_bits(const Instruction& x, uint64_t* s) {
  const uint32_t start = get<uint32_t>(s, x.from[2]) & 255, length = get<uint32_t>(s, x.from[3]) & 255;
  T out = get<T>(s, x.from[1]);
  for (uint32_t i = 0; i < length && start + i < 8 * sizeof(T); ++i) {
    const T bit = static_cast<T>(T{1} << (start + i));
    out = (get<T>(s, x.from[0]) >> i & 1) ? out | bit : out & ~bit;
  }
  set<T>(s, x.to[0], out);
  return &x + 1;
}

template <class T>
const Instruction* count_bits(const Instruction& x, uint64_t* s) {
  set<uint32_t>(s, x.to[0], static_cast<uint32_t>(__builtin_popcountll(get<T>(s, x.from[0]))));
  return &x + 1;
}
template <class T>
const Instruction* leading_zeros(const Instruction& x, uint64_t* s) {
  const uint64_t value = get<T>(s, x.from[0]);
  set<uint32_t>(s, x.to[0], value ? static_cast<uint32_t>(__builtin_clzll(value)) - (64 - 8 * sizeof(T)) : 8 * sizeof(T));
  return &x + 1;
}
// The highest bit unlike the sign; with `variant` counted from the top.
template <class T>
const Instruction* find_bit(const Instruction& x, uint64_t* s) {
  const T given = get<T>(s, x.from[0]);
  const uint64_t value = static_cast<std::make_unsigned_t<T>>(std::is_signed<T>::value && given < 0 ? ~given : given);
  const uint32_t place = value ? 63 - static_cast<uint32_t>(__builtin_clzll(value)) : ~0u;
  set<uint32_t>(s, x.to[0], value && x.variant ? 8 * sizeof(T) - 1 - place : place);
  return &x + 1;
}
template <class T>
const Instruction* reverse_bits(const Instruction& x, uint64_t* s) {
  const T value = get<T>(s, x.from[0]);
  T out = 0;
  for (uint32_t i = 0; i < 8 * sizeof(T); ++i) out = static_cast<T>(out << 1 | (value >> i & 1));
  set<T>(s, x.to[0], out);
  return &x + 1;
}

static const Instruction* permute_bytes(const Instruction& x, uint64_t* s) {
  const uint64_t bytes = uint64_t{get<uint32_t>(s, x.from[1])} << 32 | get<uint32_t>(s, x.from[0]);
  const auto selector = get<uint32_t>(s, x.from[2]);
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 255;
    out |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  set(s, x.to[0], out);
  return &x + 1;
}
static const Instruction* logic_of_three(const Instruction& x, uint64_t* s) {
  const auto a = get<uint32_t>(s, x.from[0]), b = get<uint32_t>(s, x.from[1]), c = get<uint32_t>(s, x.from[2]);
  const auto table = get<uint32_t>(s, x.from[3]);
  uint32_t out = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  set(s, x.to[0], out);
  return &x + 1;
}
// Of two words, low first; variant: 1 to the left, 2 the distance wraps at 32.
static const Instruction* funnel_shift(const Instruction& x, uint64_t* s) {
  const uint64_t words = uint64_t{get<uint32_t>(s, x.from[1])} << 32 | get<uint32_t>(s, x.from[0]);
  auto by = get<uint32_t>(s, x.from[2]);
  by = x.variant & 2 ? by & 31 : std::min(by, 32u);
  set(s, x.to[0], static_cast<uint32_t>(words >> (x.variant & 1 ? 32 - by : by)));
  return &x + 1;
}

// ---- the names

static void name_integers(Table& t) {
  using U16 = uint16_t;
  using U32 = uint32_t;
  using U64 = uint64_t;
  for (const char* sign : {"u", "s"}) {  // where signs make no difference
    const auto type = [&](const char* name, const char* bits) { return std::string(name) + "." + sign + bits; };
    t[type("add", "16")] = binary<U16, Add>, t[type("add", "32")] = binary<U32, Add>, t[type("add", "64")] = binary<U64, Add>;
    t[type("sub", "16")] = binary<U16, Subtract>, t[type("sub", "32")] = binary<U32, Subtract>;
    t[type("sub", "64")] = binary<U64, Subtract>;
    t[type("mul.lo", "16")] = binary<U16, Multiply>, t[type("mul.lo", "32")] = binary<U32, Multiply>;
    t[type("mul.lo", "64")] = binary<U64, Multiply>, t[type("mad.lo", "16")] = ternary<U16, MultiplyAdd>;
    t[type("mad.lo", "32")] = ternary<U32, MultiplyAdd>, t[type("mad.lo", "64")] = ternary<U64, MultiplyAdd>;
  }
  for (const char* name : {"mul", "mad"}) {
    const std::string wide = std::string(name) + ".wide.", high = std::string(name) + ".hi.";
    t[wide + "u16"] = multiply_wide<uint16_t>, t[wide + "s16"] = multiply_wide<int16_t>;
    t[wide + "u32"] = multiply_wide<uint32_t>, t[wide + "s32"] = multiply_wide<int32_t>;
    t[high + "u32"] = multiply_high<uint32_t>, t[high + "s32"] = multiply_high<int32_t>;
    t[high + "u64"] = multiply_high<uint64_t>, t[high + "s64"] = multiply_high<int64_t>;
  }
  const auto types = {"u16", "s16", "u32", "s32", "u64", "s64"};
  each_binary<Smaller, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(t, "min", types);
  each_binary<Larger, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(t, "max", types);
  each_binary<Quotient, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(t, "div", types);
  each_binary<Remainder, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(t, "rem", types);
  each_unary<Negate, U16, U32, U64>(t, "neg", {"s16", "s32", "s64"});
  each_unary<Magnitude, int16_t, int32_t, int64_t>(t, "abs", {"s16", "s32", "s64"});
  each_binary<And, uint8_t, U16, U32, U64>(t, "and", {"pred", "b16", "b32", "b64"});
  each_binary<Or, uint8_t, U16, U32, U64>(t, "or", {"pred", "b16", "b32", "b64"});
  each_binary<Xor, uint8_t, U16, U32, U64>(t, "xor", {"pred", "b16", "b32", "b64"});
  each_unary<Not, U16, U32, U64>(t, "not", {"b16", "b32", "b64"});
  t["not.pred"] = unary<uint8_t, NotPredicate>;
  t["shl.b16"] = shift_left<U16>, t["shl.b32"] = shift_left<U32>, t["shl.b64"] = shift_left<U64>;
  for (const char* type : {"b16", "u16"}) t[std::string("shr.") + type] = shift_right<uint16_t>;
  for (const char* type : {"b32", "u32"}) t[std::string("shr.") + type] = shift_right<uint32_t>;
  for (const char* type : {"b64", "u64"}) t[std::string("shr.") + type] = shift_right<uint64_t>;
  t["shr.s16"] = shift_right<int16_t>, t["shr.s32"] = shift_right<int32_t>, t["shr.s64"] = shift_right<int64_t>;
  t["bfe.u32"] = extract_bits<U32>, t["bfe.s32"] = extract_bits<int32_t>;
  t["bfe.u64"] = extract_bits<U64>, t["bfe.s64"] = extract_bits<int64_t>;
  t["bfi.b32"] = insert_bits<U32>, t["bfi.b64"] = insert_bits<U64>;
  t["popc.b32"] = count_bits<U32>, t["popc.b64"] = count_bits<U64>, t["clz.b32"] = leading_zeros<U32>, t["clz.b64"] = leading_zeros<U64>;
  t["brev.b32"] = reverse_bits<U32>, t["brev.b64"] = reverse_bits<U64>;
  t["prmt.b32"] = permute_bytes, t["lop3.b32"] = logic_of_three;
}

Handler integers(const Name& name, Instruction& x) {
  static const Table table = [] {
    Table t;
    name_integers(t);
    return t;
  }();
  if (name.operation == "bfind") {
    x.variant = name.has("shiftamt");
    return with_integer(name.type(), [&](auto zero) -> Handler {
      if constexpr (sizeof(zero) >= 4) return find_bit<decltype(zero)>;
      return nullptr;
    });
  }
  if (name.operation == "shf" && name.type() == "b32") {
    x.variant = (name.has("l") ? 1 : 0) | (name.has("wrap") ? 2 : 0);
    return funnel_shift;
  }
  return look_up(table, name);
}

}  // namespace simt::ptx
