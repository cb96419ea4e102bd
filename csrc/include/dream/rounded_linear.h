#pragma once
#include "dream/types.h"

namespace dream {

// y = x W^T + bias in 8-bit integers. A weight is (byte - 128) times the scale of its output; a row of x is rounded to
// integers in [-127, 127] times its largest size / 127. Sums of integers are exact, so that all instruction sets give the same
// bits. A row that holds NaN or infinity gives NaN. CPU pointers.
struct RoundedLinear {
  const void* x;          // (rows, in) dtype, row stride below, unit column stride
  const uint8_t* packed;  // (panels, ceil(in / 4), 16, 4): four neighbouring inputs side by side; padding may hold anything
  const float* scale;     // (out)
  const void* bias;       // (out) dtype, or null
  Dtype dtype;            // of x and y
  int64_t rows, in, out;  // in <= kMaxRoundedInputs
  int64_t x_row;          // elements between rows of x
  int64_t y_row;          // elements between rows of y
  void* y;                // (rows, out) dtype, unit column stride
  int threads;
};

constexpr int64_t kMaxRoundedInputs = 65536;  // 65536 x 127 x 255 < 2^31

void rounded_linear_cpu(const RoundedLinear& call);

}  // namespace dream
