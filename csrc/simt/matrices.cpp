// The collectives of tensor cores, in the places of PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "simt/runtime.h"

namespace simt {

struct Fragments {
  uint32_t a[4], b[2];
  float d[4];
};

static float element(uint32_t word, int high, bool half) {
  const auto bits = static_cast<uint16_t>(high ? word >> 16 : word);
  if (half) {
    __half value;
    std::memcpy(static_cast<void*>(&value), &bits, sizeof bits);
    return __half2float(value);
  }
  __nv_bfloat16 value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof bits);
  return __bfloat162float(value);
}

// Products are exact and sums are kept in double precision: closer to the true value than any order that hardware may use.
static void multiply_lanes(Lane* lanes, unsigned, uint64_t half, Caller) {
  float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < 32; ++l) {
    Fragments f;
    std::memcpy(&f, lanes[l].in, sizeof f);
    const int g = l / 4, t = l % 4;
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][2 * t + h + 8 * (i / 2)] = element(f.a[i], h, half);
      for (int i = 0; i < 2; ++i) b[2 * t + h + 8 * i][g] = element(f.b[i], h, half);
    }
    for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][2 * t + i % 2] = f.d[i];
  }
  for (int l = 0; l < 32; ++l) {
    float result[4];
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
      double sum = d[row][column];
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
      result[i] = static_cast<float>(sum);
    }
    std::memcpy(lanes[l].out, result, sizeof result);
  }
}

void multiply_add(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool half, Caller caller) {
  const Fragments f{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  warp_collective(multiply_lanes, half, ~0u, &f, sizeof f, d, sizeof f.d, caller);
}

static void distribute_lanes(Lane* lanes, unsigned, uint64_t parameter, Caller) {
  const int count = static_cast<int>(parameter & 7);
  const bool transposed = parameter >> 3 & 1;
  for (int l = 0; l < 32; ++l)
    for (int m = 0; m < count; ++m)
      for (int h = 0; h < 2; ++h) {
        const int along = 2 * (l % 4) + h, row = transposed ? along : l / 4, column = transposed ? l / 4 : along;
        std::memcpy(lanes[l].out + 4 * m + 2 * h, lanes[8 * m + row].in + 2 * column, 2);
      }
}

void distribute_matrices(uint32_t* registers, const unsigned char (&row)[16], int count, bool transposed, Caller caller) {
  const uint64_t parameter = static_cast<uint64_t>(count) | static_cast<uint64_t>(transposed) << 3;
  warp_collective(distribute_lanes, parameter, ~0u, row, sizeof row, registers, 4 * static_cast<size_t>(count), caller);
}

}  // namespace simt
