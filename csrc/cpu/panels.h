// How rows and panels of 16 outputs are shared out to tiles: what the linear operators have in common.
#pragma once
#include "cpu/lanes.h"
#include "dream/skinny_linear.h"

namespace dream::DREAM_ISA {

constexpr int kVecs = static_cast<int>(kPanel) / kLanes;  // registers of a panel
#if defined(__AVX512F__)
constexpr int kGroup = 3, kRows = 8;  // panels and rows of a tile: 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kGroup = 1, kRows = 4;  // 8 of 16
#else
constexpr int kGroup = 1, kRows = 2;  // 8 of 16
#endif
constexpr int64_t kAhead = 1024;  // bytes: far enough for the prefetch of a panel to arrive in time

// Up to 16 outputs of one row from `first` on, with the bias.
template <class Call, class T>
DREAM_INLINE void write_as(const float* sums, const Call& call, int64_t row, int64_t first) {
  const T* bias = static_cast<const T*>(call.bias);
  T* y = static_cast<T*>(call.y) + row * call.y_row + first;
  const int64_t left = call.out - first, count = left < kPanel ? left : kPanel;
  for (int64_t i = 0; i < count; ++i) store_scalar(y + i, bias ? sums[i] + scalar(bias + first + i) : sums[i]);
}

template <class Call>
DREAM_INLINE void write_row(const float* sums, const Call& call, int64_t row, int64_t first) {
  call.dtype == Dtype::f32 ? write_as<Call, float>(sums, call, row, first) : write_as<Call, bf16>(sums, call, row, first);
}

// The last, incomplete tile of `count` rows.
template <int PANELS, class Tiles, int ROWS = kRows - 1>
static void rest(const Tiles& tiles, int64_t row, int64_t count, int64_t panel) {
  if constexpr (ROWS > 0) {
    if (count == ROWS) return tiles.template tile<ROWS, PANELS>(row, panel);
    rest<PANELS, Tiles, ROWS - 1>(tiles, row, count, panel);
  }
}

template <int PANELS, class Tiles>
static void all_rows(const Tiles& tiles, int64_t rows, int64_t panel) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) tiles.template tile<kRows, PANELS>(row, panel);
  rest<PANELS>(tiles, row, rows - row, panel);
}

// Calls tiles.tile<ROWS, PANELS>(row, panel) until all rows of all outputs are covered, once.
template <class Tiles>
static void all_tiles(const Tiles& tiles, int64_t rows, int64_t out, int threads) {
  const int64_t panels = (out + kPanel - 1) / kPanel, groups = (panels + kGroup - 1) / kGroup;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t panel = g * kGroup, left = panels - panel;
    if (left >= kGroup) {
      all_rows<kGroup>(tiles, rows, panel);
    } else {
      for (int64_t p = 0; p < left; ++p) all_rows<1>(tiles, rows, panel + p);
    }
  }
}

}  // namespace dream::DREAM_ISA
