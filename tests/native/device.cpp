// Runs the CUDA kernels on the emulator, over the cases of device_cases.h.
//   device [matrix] [schedule=0..2] [seed=N] [poison=0..3] [eager=0|1] [without=FILE:LINE] [ptx=FILE ...] [OPERATOR ...]
//   device fault=NAME                               a kernel of device_faults.cpp
// Prints `operator hash threads copies FILE:LINE ...` for each: of its outputs, what ran, where it synchronised. `matrix` runs
// every schedule with every poison and both times of copies, and demands the same hash. Ends with 1 and a message otherwise.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "device_cases.h"
#include "guarded.h"
#include "simt/ptx.h"

namespace device_check {

constexpr uint64_t kOffset = 0xcbf29ce484222325u, kPrime = 0x100000001b3u;

uint64_t& hash() {
  static uint64_t value = kOffset;
  return value;
}

void fold(const void* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) hash() = (hash() ^ static_cast<const unsigned char*>(bytes)[i]) * kPrime;
}

struct Named {
  const char* name;
  void (*run)();
};

// The builder passes the names that device_cases.h declares.
#define X(name) {#name, name},
static const Named kOperators[] = {DREAM_DEVICE_OPERATORS};
#undef X

// Whether all values were right; the hash is left.
static bool run(const Named& op) {
  hash() = kOffset, check::lead() = 0, check::dice().seed(1);
  try {
    op.run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", op.name, error.what());
    return false;
  }
  return check::failures() == 0;
}

static bool run_matrix(const Named& op) {
  simt::Options& options = simt::options();
  uint64_t first = 0;
  for (int schedule = 0; schedule < 3; ++schedule)
    for (int poison = 0; poison < 4; ++poison)
      for (int eager = 0; eager < (simt::stats().copies ? 2 : 1); ++eager) {
        options.schedule = schedule, options.poison = poison, options.cp_async_eager = eager != 0;
        options.seed = static_cast<uint64_t>(4 * schedule + poison + 1);
        const bool right = run(op);
        if (schedule + poison + eager == 0) first = hash();
        if (right && hash() == first) continue;
        std::fprintf(stderr, "%s: %s with schedule=%d poison=%d eager=%d seed=%d\n", op.name,
                     right ? "other bits" : "a wrong value", schedule, poison, eager, static_cast<int>(options.seed));
        return false;
      }
  return true;
}

}  // namespace device_check

static bool option(const std::string& word, const char* name, std::string& value) {
  const std::string start = std::string(name) + "=";
  if (word.compare(0, start.size(), start)) return false;
  value = word.substr(start.size());
  return true;
}

int main(int count, char** words) {
  using namespace device_check;
  simt::Options& options = simt::options();
  std::vector<std::string> wanted;
  bool matrix = false;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    std::string value;
    if (word == "matrix")
      matrix = true;
    else if (option(word, "schedule", value) || option(word, "sched", value))
      options.schedule = std::atoi(value.c_str());
    else if (option(word, "seed", value))
      options.seed = static_cast<uint64_t>(std::atoll(value.c_str()));
    else if (option(word, "poison", value))
      options.poison = std::atoi(value.c_str());
    else if (option(word, "eager", value))
      options.cp_async_eager = value != "0";
    else if (option(word, "without", value))
      options.without = value;
    else if (option(word, "ptx", value))
      simt::load_ptx(value);
    else if (option(word, "fault", value))
      return run_fault(value.c_str());
    else if (std::any_of(std::begin(kOperators), std::end(kOperators), [&](const Named& op) { return op.name == word; }))
      wanted.push_back(word);
    else
      return std::fprintf(stderr, "device: no operator or option %s\n", word.c_str()), 2;
  }
  for (const Named& op : kOperators) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), op.name) == wanted.end()) continue;
    simt::take_sites();
    simt::stats() = {};
    if (matrix ? !run_matrix(op) : !run(op)) return 1;
    std::printf("%s %016llx %llu %llu", op.name, static_cast<unsigned long long>(hash()),
                static_cast<unsigned long long>(simt::stats().threads), static_cast<unsigned long long>(simt::stats().copies));
    for (const std::string& site : simt::take_sites()) std::printf(" %s", site.c_str());
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}
