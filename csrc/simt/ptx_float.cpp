// Arithmetic of floats.
#include <cmath>
#include <limits>

#include "simt/ptx_values.h"

namespace simt::ptx {

// Two halves of a word.
template <class T, class Operation>
const Instruction* paired(const Instruction& x, uint64_t* s) {
  uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    T in[3];
    for (int i = 0; i < 3; ++i) {
      const auto bits = static_cast<uint16_t>(get<uint32_t>(s, x.from[i]) >> 16 * half);
      std::memcpy(static_cast<void*>(&in[i]), &bits, sizeof bits);
    }
    const T out = Operation()(in[0], in[1], in[2]);
    uint16_t bits;
    std::memcpy(&bits, &out, sizeof bits);
    word |= uint32_t{bits} << 16 * half;
  }
  set(s, x.to[0], word);
  return &x + 1;
}

SIMT_OPERATION(FloatAdd, narrow<T>(wide(a) + wide(b)))
SIMT_OPERATION(FloatSubtract, narrow<T>(wide(a) - wide(b)))
SIMT_OPERATION(FloatMultiply, narrow<T>(wide(a) * wide(b)))
SIMT_OPERATION(FloatMultiplyAdd, narrow<T>(wide(a) * wide(b) + wide(c)))
SIMT_OPERATION(FloatSmaller, narrow<T>(std::fmin(wide(a), wide(b))))
SIMT_OPERATION(FloatLarger, narrow<T>(std::fmax(wide(a), wide(b))))
SIMT_OPERATION(WithSign, static_cast<T>(std::copysign(b, a)))
SIMT_OPERATION(FloatNegate, narrow<T>(-wide(a)))
SIMT_OPERATION(FloatMagnitude, narrow<T>(std::fabs(wide(a))))
SIMT_OPERATION(FloatQuotient, static_cast<T>(a / b))
SIMT_OPERATION(FusedMultiplyAdd, static_cast<T>(std::fma(a, b, c)))
SIMT_OPERATION(Reciprocal, static_cast<T>(1 / a))
SIMT_OPERATION(Root, static_cast<T>(std::sqrt(a)))
SIMT_OPERATION(ReciprocalRoot, static_cast<T>(1 / std::sqrt(a)))
SIMT_OPERATION(PowerOfTwo, static_cast<T>(std::exp2(a)))
SIMT_OPERATION(LogarithmOfTwo, static_cast<T>(std::log2(a)))
SIMT_OPERATION(HyperbolicTangent, static_cast<T>(std::tanh(a)))

// .ftz: floats below 2^-126 are zeros, before and after.
template <class Operation>
struct Flushed {
  static float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }
  float operator()(float a) const { return flush(Operation()(flush(a))); }
};

static void name_floats(Table& t) {
  for (const char* rounding : {"", ".rn"}) {
    const auto type = [&](const char* name, const char* type) { return std::string(name) + rounding + "." + type; };
    t[type("add", "f32")] = binary<float, FloatAdd>, t[type("add", "f64")] = binary<double, FloatAdd>;
    t[type("sub", "f32")] = binary<float, FloatSubtract>, t[type("sub", "f64")] = binary<double, FloatSubtract>;
    t[type("mul", "f32")] = binary<float, FloatMultiply>, t[type("mul", "f64")] = binary<double, FloatMultiply>;
    t[type("add", "f16")] = binary<__half, FloatAdd>, t[type("sub", "f16")] = binary<__half, FloatSubtract>;
    t[type("mul", "f16")] = binary<__half, FloatMultiply>, t[type("add", "bf16")] = binary<__nv_bfloat16, FloatAdd>;
    t[type("sub", "bf16")] = binary<__nv_bfloat16, FloatSubtract>, t[type("mul", "bf16")] = binary<__nv_bfloat16, FloatMultiply>;
    t[type("add", "f16x2")] = paired<__half, FloatAdd>, t[type("add", "bf16x2")] = paired<__nv_bfloat16, FloatAdd>;
    t[type("sub", "f16x2")] = paired<__half, FloatSubtract>, t[type("sub", "bf16x2")] = paired<__nv_bfloat16, FloatSubtract>;
    t[type("mul", "f16x2")] = paired<__half, FloatMultiply>, t[type("mul", "bf16x2")] = paired<__nv_bfloat16, FloatMultiply>;
  }
  t["fma.rn.f32"] = ternary<float, FusedMultiplyAdd>, t["fma.rn.f64"] = ternary<double, FusedMultiplyAdd>;
  t["fma.rn.f16"] = ternary<__half, FloatMultiplyAdd>, t["fma.rn.bf16"] = ternary<__nv_bfloat16, FloatMultiplyAdd>;
  t["fma.rn.f16x2"] = paired<__half, FloatMultiplyAdd>, t["fma.rn.bf16x2"] = paired<__nv_bfloat16, FloatMultiplyAdd>;
  each_binary<FloatSmaller, float, double, __half, __nv_bfloat16>(t, "min", {"f32", "f64", "f16", "bf16"});
  each_binary<FloatLarger, float, double, __half, __nv_bfloat16>(t, "max", {"f32", "f64", "f16", "bf16"});
  each_unary<FloatNegate, float, double, __half, __nv_bfloat16>(t, "neg", {"f32", "f64", "f16", "bf16"});
  each_unary<FloatMagnitude, float, double, __half, __nv_bfloat16>(t, "abs", {"f32", "f64", "f16", "bf16"});
  for (const char* how : {"rn", "full", "approx"}) t[std::string("div.") + how + ".f32"] = binary<float, FloatQuotient>;
  t["copysign.f32"] = binary<float, WithSign>;
  t["div.rn.f64"] = binary<double, FloatQuotient>, t["rcp.rn.f64"] = unary<double, Reciprocal>, t["sqrt.rn.f64"] = unary<double, Root>;
  for (const char* how : {"rn", "approx"}) {
    t[std::string("rcp.") + how + ".f32"] = unary<float, Reciprocal>;
    t[std::string("sqrt.") + how + ".f32"] = unary<float, Root>;
  }
  t["rsqrt.approx.f32"] = unary<float, ReciprocalRoot>, t["tanh.approx.f32"] = unary<float, HyperbolicTangent>;
  t["ex2.approx.f32"] = unary<float, PowerOfTwo>, t["lg2.approx.f32"] = unary<float, LogarithmOfTwo>;
  t["ex2.approx.ftz.f32"] = unary<float, Flushed<PowerOfTwo>>, t["lg2.approx.ftz.f32"] = unary<float, Flushed<LogarithmOfTwo>>;
  t["rcp.approx.ftz.f32"] = unary<float, Flushed<Reciprocal>>, t["rsqrt.approx.ftz.f32"] = unary<float, Flushed<ReciprocalRoot>>;
}

Handler floats(const Name& name, Instruction&) {
  static const Table table = [] {
    Table t;
    name_floats(t);
    return t;
  }();
  return look_up(table, name);
}

}  // namespace simt::ptx
