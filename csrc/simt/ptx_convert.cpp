// cvt: between integers and floats of all sizes.
#include <cmath>
#include <limits>

#include "simt/ptx_values.h"

namespace simt::ptx {

enum Rounding { kNearest, kToZero, kDown, kUp };

static double rounded(double x, int how) {
  switch (how) {
    case kToZero: return std::trunc(x);
    case kDown: return std::floor(x);
    case kUp: return std::ceil(x);
    default: return std::nearbyint(x);
  }
}

template <class T>
constexpr bool is_integer = std::is_integral<T>::value;

// Out of range: the nearest integer there is; not a number: 0.
template <class To>
To clamped(double x) {
  constexpr To least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max();
  if (std::isnan(x)) return 0;
  if (x <= static_cast<double>(least)) return least;
  if (x >= static_cast<double>(most)) return most;
  return static_cast<To>(x);
}

template <class To, class From>
const Instruction* convert(const Instruction& x, uint64_t* s) {
  const From value = get<From>(s, x.from[0]);
  if constexpr (is_integer<To> && is_integer<From>)
    set<To>(s, x.to[0], static_cast<To>(value));
  else if constexpr (is_integer<To>)
    set<To>(s, x.to[0], clamped<To>(rounded(wide(value), x.variant)));
  else if constexpr (is_integer<From> && (std::is_same<To, float>::value || std::is_same<To, double>::value))
    set<To>(s, x.to[0], static_cast<To>(value));  // rounded once
  else if constexpr (is_integer<From>)
    set<To>(s, x.to[0], narrow<To>(static_cast<double>(value)));
  else
    set<To>(s, x.to[0], narrow<To>(wide(value)));
  return &x + 1;
}

static const Instruction* to_integral_float(const Instruction& x, uint64_t* s) {
  set<float>(s, x.to[0], static_cast<float>(rounded(get<float>(s, x.from[0]), x.variant)));
  return &x + 1;
}

// The first source is the high half.
template <class Half>
const Instruction* convert_pair(const Instruction& x, uint64_t* s) {
  uint32_t word = 0;
  for (int i = 0; i < 2; ++i) {
    const Half half = narrow<Half>(get<float>(s, x.from[i]));
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    word = word << 16 | bits;
  }
  set(s, x.to[0], word);
  return &x + 1;
}

template <class To>
Handler from_type(const std::string& type) {
  if (type == "f32") return convert<To, float>;
  if (type == "f64") return convert<To, double>;
  if (type == "f16") return convert<To, __half>;
  if (type == "bf16") return convert<To, __nv_bfloat16>;
  return with_integer(type, [](auto zero) -> Handler { return convert<To, decltype(zero)>; });
}

Handler conversions(const Name& name, Instruction& x) {
  if (name.operation != "cvt" || name.modifiers.size() < 2) return nullptr;
  const std::string &to = name.modifiers[name.modifiers.size() - 2], &from = name.type();
  std::string rounding = name.modifiers.size() == 3 ? name.modifiers[0] : "";
  if (name.modifiers.size() > 3) return nullptr;
  static const std::map<std::string, int> integral = {{"rni", kNearest}, {"rzi", kToZero}, {"rmi", kDown}, {"rpi", kUp}};
  if (const auto found = integral.find(rounding); found != integral.end()) {
    x.variant = found->second;
    if (to == "f32" && from == "f32") return to_integral_float;
    return with_integer(to, [&](auto zero) { return from[0] == 'f' || from[0] == 'b' ? from_type<decltype(zero)>(from) : nullptr; });
  }
  if (!rounding.empty() && rounding != "rn") return nullptr;
  if (to == "bf16x2" && from == "f32") return convert_pair<__nv_bfloat16>;
  if (to == "f16x2" && from == "f32") return convert_pair<__half>;
  if (to == "f32") return from_type<float>(from);
  if (to == "f64") return from_type<double>(from);
  if (to == "f16") return from_type<__half>(from);
  if (to == "bf16") return from_type<__nv_bfloat16>(from);
  return with_integer(to, [&](auto zero) { return from_type<decltype(zero)>(from); });
}

}  // namespace simt::ptx
