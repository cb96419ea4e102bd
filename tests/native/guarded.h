// Memory whose every byte outside the elements of a tensor is a trap: poisoned under AddressSanitizer, and everywhere filled
// with 0xff (NaN as a float, -1 as an index), which must neither change nor reach a result.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "dream/types.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#endif

namespace check {

inline std::string& where() {  // the case at work, for messages
  static std::string text;
  return text;
}

inline int64_t& failures() {
  static int64_t count = 0;
  return count;
}

inline void require(bool holds, const char* what) {  // goes on: a sanitizer may have more to say
  if (!holds && ++failures() <= 20) std::fprintf(stderr, "%s: %s\n", where().c_str(), what);
}

inline std::mt19937& dice() {
  static std::mt19937 generator(1);
  return generator;
}
inline int64_t pick(int64_t below) { return static_cast<int64_t>(dice()() % static_cast<uint64_t>(below)); }

// Elements before a tensor. With 0 its first byte, with 1 no register-sized load of it is aligned; both are run.
inline int64_t& lead() {
  static int64_t elements = 0;
  return elements;
}

inline int64_t size_of(dream::Dtype dtype) { return dtype == dream::Dtype::f32 ? 4 : dtype == dream::Dtype::bf16 ? 2 : 1; }

// A tensor of `shape` with `strides` (in elements of `item` bytes; empty = contiguous) that ends where its memory ends.
class Tensor {
 public:
  Tensor(int64_t item, std::vector<int64_t> shape, std::vector<int64_t> strides = {}) : item_(item) {
    if (strides.empty()) {
      strides.resize(shape.size());
      int64_t stride = 1;
      for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[d] = stride;
    }
    places_ = {0};
    for (size_t d = 0; d < shape.size(); ++d) {
      std::vector<int64_t> next;
      for (const int64_t place : places_)
        for (int64_t i = 0; i < shape[d]; ++i) next.push_back(place + i * strides[d]);
      places_ = std::move(next);
    }
    int64_t end = 0;
    for (const int64_t place : places_) end = place + 1 > end ? place + 1 : end;
    bytes_ = (lead_ + end) * item;
    memory_ = static_cast<char*>(std::malloc(bytes_ ? bytes_ : 1));
    std::memset(memory_, 0xff, bytes_ ? bytes_ : 1);
    used_.assign(lead_ + end, false);
    for (const int64_t place : places_) used_[lead_ + place] = true;
    guard(true);
  }
  ~Tensor() {
    guard(false);
    for (size_t i = 0; i < used_.size(); ++i)
      for (int64_t b = 0; !used_[i] && b < item_; ++b)
        require(memory_[i * item_ + b] == '\xff', "wrote between the rows of a tensor or before it");
    std::free(memory_);
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(memory_ + lead_ * item_);
  }
  int64_t size() const { return static_cast<int64_t>(places_.size()); }

  template <class T>
  void set(int64_t index, T value) {
    std::memcpy(memory_ + (lead_ + places_[index]) * item_, &value, sizeof value);
  }
  template <class T>
  T get(int64_t index) const {
    T value;
    std::memcpy(&value, memory_ + (lead_ + places_[index]) * item_, sizeof value);
    return value;
  }

  Tensor& random(dream::Dtype dtype) {  // floats in (-2, 2)
    for (int64_t i = 0; i < size(); ++i) set_float(dtype, i, static_cast<float>(pick(4001) - 2000) / 1000.f);
    return *this;
  }
  Tensor& random_bytes() {
    for (int64_t i = 0; i < size(); ++i) std::memset(memory_ + (lead_ + places_[i]) * item_, static_cast<int>(pick(255)), item_);
    return *this;
  }
  void set_float(dream::Dtype dtype, int64_t index, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (dtype == dream::Dtype::f32)
      set(index, bits);
    else
      set(index, static_cast<uint16_t>(bits >> 16));
  }
  float get_float(dream::Dtype dtype, int64_t index) const {
    if (dtype == dream::Dtype::f32) return get<float>(index);
    const uint32_t bits = uint32_t{get<uint16_t>(index)} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  Tensor& require_finite(dream::Dtype dtype) {
    for (int64_t i = 0; i < size(); ++i)
      require(get_float(dtype, i) - get_float(dtype, i) == 0.f, "an output was left out, or hidden memory reached it");
    return *this;
  }
  std::string bits() const {  // the elements, in order
    std::string text;
    for (const int64_t place : places_) text.append(memory_ + (lead_ + place) * item_, item_);
    return text;
  }

 private:
  void guard(bool on) {
    for (size_t i = 0; i < used_.size();) {
      size_t end = i;
      while (end < used_.size() && used_[end] == used_[i]) ++end;
      if (!used_[i] && on) ASAN_POISON_MEMORY_REGION(memory_ + i * item_, (end - i) * item_);
      if (!used_[i] && !on) ASAN_UNPOISON_MEMORY_REGION(memory_ + i * item_, (end - i) * item_);
      i = end;
    }
  }

  int64_t item_, lead_ = lead(), bytes_ = 0;
  char* memory_ = nullptr;
  std::vector<int64_t> places_;  // of the elements, counted from the first
  std::vector<bool> used_;       // of the whole memory, lead included
};

inline Tensor& ids(Tensor& tensor, int64_t (*value)(int64_t)) {
  for (int64_t i = 0; i < tensor.size(); ++i) tensor.set<int64_t>(i, value(i));
  return tensor;
}

// run(threads) gives the bits of all outputs; they must be the same for every number of threads.
template <class Run>
void every_thread_count(Run run) {
  const std::string one = run(1);
  for (const int threads : {2, 7}) require(run(threads) == one, "the bits depend on the number of threads");
}

template <class Call>
void refuses(Call call) {
  bool refused = false;
  try {
    call();
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  require(refused, "accepted what the contract refuses");
}

template <class... Values>
void at(const char* op, Values... values) {
  where() = op;
  ((where() += " " + std::to_string(values)), ...);
}

}  // namespace check
