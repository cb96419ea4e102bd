// keep_path on the device: every word that a row may move by, batches with paths of their own, what device memory may say.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_cases.h"
#include "dream/keep_path.h"
#include "guarded.h"

namespace device_check {

using check::at;
using check::pick;
using check::require;
using check::Tensor;

namespace {

struct Layout {
  int64_t batch, heads, capacity, row;  // row in elements of `item` bytes
  int64_t item;
  int64_t gap, around;                  // elements between rows, and between heads and sequences, which belong to nobody
};

// A cache tensor: a window of a larger buffer where there is a gap.
struct Cache {
  explicit Cache(const Layout& x)
      : layout(x),
        slot(x.row + x.gap),
        head(x.capacity * slot + x.around),
        memory(x.item, {x.batch, x.heads, x.capacity, x.row}, {x.heads * head + x.around, head, slot, 1}) {
    memory.random_bytes();
  }
  dream::CacheBuffer buffer() const {
    const Layout& x = layout;
    const int64_t batch_stride = (x.heads * head + x.around) * x.item;
    return {memory.data(), x.batch, x.heads, x.capacity, x.row * x.item, batch_stride, head * x.item, slot * x.item};
  }
  std::string bits() const { return memory.bits(); }

  Layout layout;
  int64_t slot, head;
  Tensor memory;
};

struct Paths {
  Paths(int64_t sequences, int64_t width)
      : sequences(sequences), width(width), start(8, {sequences}), path(8, {sequences, width}), lengths(8, {sequences}) {}
  // Row b starts at `first` and keeps `length` of the slots below `below`, ascending.
  void row(int64_t b, int64_t first, int64_t length, int64_t below) {
    start.set<int64_t>(b, first), lengths.set<int64_t>(b, length);
    std::vector<int64_t> slots(below);
    for (int64_t i = 0; i < below; ++i) slots[i] = i;
    std::shuffle(slots.begin(), slots.end(), check::dice());
    std::sort(slots.begin(), slots.begin() + length);
    for (int64_t i = 0; i < length; ++i) path.set<int64_t>(b * width + i, slots[i]);
  }
  int64_t sequences, width;
  Tensor start, path, lengths;
};

// What must stand in a cache afterwards: rows of the old bits. Rows that device memory names out of range stay.
std::string expected(const Cache& cache, const Paths& paths, bool all) {
  const Layout& x = cache.layout;
  const std::string old = cache.bits();
  std::string now = old;
  const int64_t bytes = x.row * x.item;
  for (int64_t lane = 0; lane < x.batch * x.heads; ++lane) {
    const int64_t b = paths.sequences == 1 ? 0 : lane / x.heads;
    const int64_t start = paths.start.get<int64_t>(b), length = all ? paths.width : std::min(paths.lengths.get<int64_t>(b), paths.width);
    for (int64_t i = 0; i < length && start >= 0 && start < x.capacity; ++i) {
      const int64_t slot = paths.path.get<int64_t>(b * paths.width + i);
      if (slot < i || slot >= x.capacity - start) continue;
      std::memcpy(&now[(lane * x.capacity + start + i) * bytes], &old[(lane * x.capacity + start + slot) * bytes], bytes);
    }
  }
  return now;
}

// Lengths of null stand for the width.
void run(const std::vector<std::unique_ptr<Cache>>& caches, const Paths& paths, bool all) {
  std::vector<dream::CacheBuffer> buffers;
  std::vector<std::string> wanted;
  for (const auto& cache : caches) buffers.push_back(cache->buffer()), wanted.push_back(expected(*cache, paths, all));
  dream::KeepPath call{};
  call.buffers = buffers.data(), call.count = static_cast<int64_t>(buffers.size());
  call.start = paths.start.data<int64_t>(), call.path = paths.path.data<int64_t>();
  call.lengths = all ? nullptr : paths.lengths.data<int64_t>();
  call.sequences = paths.sequences, call.width = paths.width;
  dream::keep_path_cuda(call, 0, nullptr);
  for (size_t b = 0; b < caches.size(); ++b) {
    const std::string got = caches[b]->bits();
    require(got == wanted[b], "rows are not where the path says");
    fold(got.data(), got.size());
  }
}

void run(const Layout& layout, const Paths& paths, bool all = false) {
  std::vector<std::unique_ptr<Cache>> caches;
  caches.push_back(std::make_unique<Cache>(layout));
  run(caches, paths, all);
}

// With a gap of 1, rows of 31 stand in slots that a wider word would fit.
void every_word() {
  for (const int64_t item : {1, 2, 4, 8, 16})
    for (const int64_t row : {1, 31, 33})
      for (const int64_t gap : {0, 1}) {
        at("keep_path words", item, row, gap);
        Paths paths(1, 5);
        paths.row(0, 2, 5, 9);
        run({1, 3, 11, row, item, gap, 0}, paths, true);
      }
}

void every_length() {
  for (const int64_t length : {0, 1, 3, 4, 5, 8, 63, 64}) {
    at("keep_path length", length);
    Paths paths(1, 64);
    paths.row(0, 1, length, 66);
    run({1, 2, 67, 4, 4, 0, 0}, paths);
  }
  at("keep_path width 0");
  run({1, 1, 2, 4, 4, 0, 0}, Paths(1, 0));
}

// Rows of a batch with starts and lengths of their own, in windows of larger buffers.
void ragged() {
  for (const int64_t batch : {1, 2, 5}) {
    at("keep_path ragged", batch);
    Paths paths(batch, 7);
    for (int64_t b = 0; b < batch; ++b) paths.row(b, 3 * b, (3 * b) % 8, 9);
    run({batch, 3, 24, 9, 2, 3, 5}, paths);
  }
}

// Nothing outside a buffer is touched, and no row that is in range stays behind, whatever device memory says.
void hostile() {
  const int64_t far = int64_t{1} << 62;
  for (const int64_t start : {int64_t{-1}, -far, int64_t{8}, far, int64_t{7}, int64_t{0}})
    for (const int64_t slot : {int64_t{-1}, -far, int64_t{8}, far, int64_t{7}, int64_t{0}})
      for (const int64_t length : {int64_t{-5}, int64_t{2}, far}) {
        at("keep_path hostile", start, slot, length);
        Paths paths(2, 2);
        paths.row(0, 1, 2, 5);
        paths.row(1, start, 2, 5);
        paths.path.set<int64_t>(2, 0), paths.path.set<int64_t>(3, slot);
        paths.lengths.set<int64_t>(1, length);
        run({2, 1, 8, 2, 4, 0, 0}, paths);
      }
}

// More buffers than one launch takes, of different shapes and words.
void many_buffers() {
  for (const int64_t count : {0, 159, 160, 161, 323}) {
    at("keep_path buffers", count);
    std::vector<std::unique_ptr<Cache>> caches;
    for (int64_t i = 0; i < count; ++i)
      caches.push_back(std::make_unique<Cache>(Layout{2, 1 + i % 3, 6 + i % 2, 1 + i % 5, i < 160 ? 8 : 2, 0, 0}));
    Paths paths(2, 3);
    paths.row(0, 0, 3, 5), paths.row(1, 1, 2, 4);
    run(caches, paths, false);
  }
}

}  // namespace

void keep_path() {
  every_word();
  every_length();
  ragged();
  hostile();
  many_buffers();
}

}  // namespace device_check
