// The emulator behind simt.h: every CUDA thread is a fiber of one host thread, blocks run one after another. What a kernel does
// wrong (divergent barriers, lanes outside a mask, too much shared memory) ends the process with status 86 and a message.
#pragma once
#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

extern uint3 threadIdx, blockIdx;  // of the thread at work
extern dim3 blockDim, gridDim;

namespace simt {

struct Options {
  int schedule = 0;              // order of threads and blocks: 0 forward, 1 reverse, 2 random
  uint64_t seed = 1;             // of random orders and random bytes
  int poison = 1;                // shared memory at first: 0 zeros, 1 0xff (NaN, -1), 2 random bytes, 3 0x3c (small finite floats)
  bool cp_async_eager = false;   // asynchronous copies at their issue; otherwise as late as the waits allow
  size_t shared_limit = 163 * 1024;  // a block's limit on compute capability 8.0, the least of those built for
  bool prepared_only = true;     // whether a launch needs an earlier call of prepare(), as before a graph capture
  std::string without;           // FILE:LINE of a synchronisation that shall do nothing: somebody must notice
};
Options& options();

struct Stats {
  uint64_t launches, blocks, threads, copies;  // copies: cp.async, each of a thread
};
Stats& stats();

// A line of a kernel. As a default argument it is the line of the call.
struct Caller {
  const char* file;
  int line;
};
#define SIMT_CALLER simt::Caller caller = {__builtin_FILE(), __builtin_LINE()}

[[noreturn]] void fail(Caller caller, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The places FILE:LINE of all synchronisations since the last call.
std::vector<std::string> take_sites();

// ---- launches
void prepare(const void* kernel, size_t shared_bytes);

struct Launch {
  const void* kernel;
  dim3 grid, block;
  size_t shared_bytes;  // dynamic
  Caller caller;
};
void check(const Launch& launch);  // fails where CUDA would refuse
// Runs entry(argument) once a thread.
void run(const Launch& launch, void (*entry)(void*), void* argument);

// May run a kernel in another way, given the addresses of its arguments: as PTX.
using Interpreter = void (*)(const Launch& launch, void** arguments);
Interpreter& interpreter();

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, Caller caller, Arguments&&... given) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, std::tuple<Parameters...>(std::forward<Arguments>(given)...)};
  const Launch what{reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, caller};
  check(what);
  if (interpreter()) {
    std::apply(
        [&](auto&... argument) {
          void* addresses[] = {const_cast<void*>(static_cast<const void*>(&argument))...};
          interpreter()(what, addresses);
        },
        call.arguments);
    return;
  }
  run(
      what, [](void* at) { std::apply(static_cast<Call*>(at)->kernel, static_cast<Call*>(at)->arguments); }, &call);
}

// ---- shared memory of the block at work
void* shared_static(const void* key, size_t bytes);  // the same for every thread that gives the same key
void* shared_dynamic();
size_t shared_dynamic_bytes();

// ---- synchronisation
struct Votes {
  int all, any, count;  // of the threads' predicates
};
Votes block_barrier(int predicate, Caller caller);
void warp_barrier(unsigned mask, Caller caller);

// ---- warp collectives
struct alignas(64) Lane {
  unsigned char in[64], out[64];
  bool active;
};
// Called once, by the last of the mask's lanes to arrive, for all of them.
using WarpFunction = void (*)(Lane* lanes, unsigned mask, uint64_t parameter, Caller caller);
void warp_collective(WarpFunction function, uint64_t parameter, unsigned mask, const void* in, size_t in_bytes, void* out,
                     size_t out_bytes, Caller caller);
int lane();

enum class Shuffle : int { index, up, down, butterfly };
uint64_t shuffle(Shuffle mode, unsigned mask, uint64_t value, int source, int width, Caller caller);
unsigned ballot(unsigned mask, bool predicate, Caller caller);
unsigned match_any(unsigned mask, uint64_t value, Caller caller);

enum class Reduction : int { add, min_signed, max_signed, min_unsigned, max_unsigned, bit_and, bit_or, bit_xor };
uint32_t reduce(Reduction operation, unsigned mask, uint32_t value, Caller caller);

// d (16 x 8) += a (16 x 16) b (16 x 8), in the lanes' places that PTX gives to mma.m16n8k16; `half`: f16, otherwise bf16.
void multiply_add(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool half, Caller caller);
// ldmatrix of `count` matrices; lanes 8 i .. 8 i + 7 bring the rows of matrix i, 16 bytes each.
void distribute_matrices(uint32_t* registers, const unsigned char (&row)[16], int count, bool transposed, Caller caller);

// ---- asynchronous copies of a thread
void copy_async(void* shared, const void* global, int bytes, int valid_bytes, Caller caller);  // zeros behind the valid bytes
void copy_async_commit(Caller caller);
void copy_async_wait(int pending, Caller caller);

}  // namespace simt
