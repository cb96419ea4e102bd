// Rows of a vocabulary for the cases of the tree operators: their memory, what they hold, and how they rank.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/simt.cuh"
#include "device_cases.h"
#include "guarded.h"

namespace device_check {

using check::at;
using check::pick;
using check::refuses;
using check::require;
using check::Tensor;
using dream::Dtype;

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

inline void fold_bits(const std::string& bits) { fold(bits.data(), bits.size()); }

// A tensor whose memory starts `lead` elements before it, so that its rows are not aligned.
inline std::unique_ptr<Tensor> tensor_at(int64_t lead, int64_t item, std::vector<int64_t> shape, std::vector<int64_t> strides = {}) {
  check::lead() = lead;
  auto made = std::make_unique<Tensor>(item, std::move(shape), std::move(strides));
  check::lead() = 0;
  return made;
}

// (batch, rows, vocab) floats as a dtype holds them, in memory of that dtype.
struct VocabRows {
  VocabRows(Dtype dtype, int64_t batch, int64_t rows, int64_t vocab, int64_t gap, int64_t lead)
      : dtype(dtype), batch(batch), rows(rows), vocab(vocab), row_stride(vocab + gap), batch_stride(rows * row_stride + gap) {
    memory = tensor_at(lead, dtype == Dtype::f32 ? 4 : 2, {batch, rows, vocab}, {batch_stride, row_stride, 1});
    values.resize(batch * rows * vocab);
  }
  void set(int64_t row, int64_t id, float value) {
    float& held = values[row * vocab + id];
    if (dtype == Dtype::f32) memory->set(row * vocab + id, held = value);
    if (dtype == Dtype::bf16) {
      const auto rounded = __float2bfloat16(value);
      memory->set(row * vocab + id, rounded), held = __bfloat162float(rounded);
    }
    if (dtype == Dtype::f16) {
      const auto rounded = __float2half(value);
      memory->set(row * vocab + id, rounded), held = __half2float(rounded);
    }
  }
  const float* row(int64_t index) const { return values.data() + index * vocab; }

  Dtype dtype;
  int64_t batch, rows, vocab, row_stride, batch_stride;
  std::unique_ptr<Tensor> memory;
  std::vector<float> values;
};

enum class Kind { random, rising, falling, ties, equal, zeros, nothing, last, scarce, nan, infinite, kinds };

// Logits that each find another mistake: long insertions, ties over lanes, words and splits, -0, too few numbers, NaN.
inline float logit(Kind kind, int64_t id, int64_t vocab) {
  switch (kind) {
    case Kind::rising: return static_cast<float>(id) / 16.f - 20.f;
    case Kind::falling: return static_cast<float>(-id) / 16.f;
    case Kind::ties: return static_cast<float>(pick(4));
    case Kind::equal: return -2.5f;
    case Kind::zeros: return pick(2) ? 0.f : -0.f;
    case Kind::nothing: return -INFINITY;
    case Kind::last: return id == vocab - 1 ? 9.f : id % 3 ? -INFINITY : -1.f;
    case Kind::scarce: return id % 97 == 5 ? static_cast<float>(pick(5)) : -INFINITY;
    case Kind::nan: return id == vocab / 3 ? NAN : id == vocab / 2 ? -NAN : static_cast<float>(-id) / 16.f;
    case Kind::infinite: return pick(40) ? static_cast<float>(pick(100)) / 8.f : INFINITY;
    default: return static_cast<float>(pick(20001) - 10000) / 700.f;
  }
}

// The indices of values, best first, equal values in order.
inline std::vector<int64_t> ranking(const float* values, int64_t count) {
  std::vector<float> keys(values, values + count);
  for (float& key : keys) key = std::isnan(key) ? -INFINITY : key;
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys[a] > keys[b]; });
  return order;
}

}  // namespace device_check
