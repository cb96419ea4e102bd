// Words shared by all contracts. Nothing here knows a framework.
#pragma once
#include <cstdint>

namespace dream {

enum class Dtype : uint8_t { f32, bf16, f16 };  // f16 on CUDA alone

}  // namespace dream
