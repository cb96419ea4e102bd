#include "simt/ptx.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "simt/block.h"

namespace simt {
namespace ptx {

constexpr int kFailure = 87;  // exit status

static std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> value;
  return value;
}

void die(const std::string& what) {
  std::fprintf(stderr, "ptx: %s\n", what.c_str());
  std::fflush(stderr);
  std::_Exit(kFailure);
}

struct Work {
  const Kernel* kernel;
  std::vector<uint64_t> parameters;
};

static void set_special(std::vector<uint64_t>& slots, const Work& work) {
  const uint64_t values[] = {threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z,
                             blockDim.x,  blockDim.y,  blockDim.z,  gridDim.x,  gridDim.y,  gridDim.z};
  std::copy(std::begin(values), std::end(values), &slots[kTidX]);
  slots[kLaneId] = static_cast<uint64_t>(lane());
  slots[kLanesBelow] = (uint64_t{1} << lane()) - 1;
  slots[kDynamicShared] = work.kernel->shared_bytes;
  slots[kDynamicBytes] = shared_dynamic_bytes() - work.kernel->shared_bytes;
  slots[kParameters] = reinterpret_cast<uint64_t>(work.parameters.data());
}

static void run_thread(void* argument) {
  const Work& work = *static_cast<const Work*>(argument);
  std::vector<uint64_t> slots = work.kernel->slots;
  set_special(slots, work);
  std::vector<uint64_t> local(work.kernel->local_bytes / sizeof(uint64_t) + 2, 0xfefefefefefefefe);
  slots[kLocal] = (reinterpret_cast<uint64_t>(local.data()) + 15) / 16 * 16;
  const Instruction* next = work.kernel->code.data();
  while (next) next = (slots[next->guard] & 1) == next->wanted ? next->run(*next, slots.data()) : next + 1;
}

static void interpret(const Launch& launch, void** arguments) {
  Dl_info symbol;
  if (!dladdr(launch.kernel, &symbol) || !symbol.dli_sname) die("a kernel without a symbol: is it static, or -rdynamic missing?");
  const auto found = kernels().find(symbol.dli_sname);
  if (found == kernels().end()) die(std::string("no PTX of ") + symbol.dli_sname);
  Work work{&found->second, std::vector<uint64_t>(found->second.parameter_bytes / sizeof(uint64_t) + 2)};
  for (const Parameter& parameter : found->second.parameters)
    std::memcpy(reinterpret_cast<char*>(work.parameters.data()) + parameter.offset, *arguments++, parameter.bytes);
  Launch with_static = launch;
  with_static.shared_bytes += found->second.shared_bytes;
  run(with_static, run_thread, &work);
}

}  // namespace ptx

void load_ptx(const std::string& path) {
  ptx::parse(path, ptx::kernels());
  interpreter() = ptx::interpret;
}

}  // namespace simt
