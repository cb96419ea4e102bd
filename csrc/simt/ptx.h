// An interpreter of PTX: runs what nvcc made of a kernel, one fiber a thread, where simt::launch would run the host's build.
// It knows the instructions that kernels came to need, and dies at any other.
//
// Every operand is a slot: registers, then constants, then the thread's special values. Addresses of global, local, constant and
// parameter memory are the host's; those of shared memory are offsets in it, and kSharedWindow + offset as generic addresses.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "simt/runtime.h"

namespace simt {

void load_ptx(const std::string& path);  // its kernels run as PTX from now on; a kernel of no loaded file cannot be launched

namespace ptx {

struct Instruction;
// Returns the next instruction, or null at the thread's end.
using Handler = const Instruction* (*)(const Instruction& self, uint64_t* slots);

struct Instruction {
  Handler run = nullptr;
  uint32_t guard = 0;  // slot of the predicate
  uint64_t wanted = 1;
  uint32_t to[4] = {}, from[10] = {};
  uint32_t base = 0;  // of an address in brackets
  int64_t offset = 0;
  int64_t source_offset = 0;  // of the second address of cp.async, whose base is from[0]
  bool addressed = false;     // whether there is an operand in brackets, or a parameter's name
  int results = 0, sources = 0;
  int variant = 0;            // what the handler's family makes of the modifiers
  const Instruction* target = nullptr;
  std::vector<const Instruction*> targets;  // of brx.idx
  Caller place = {};
  std::string text;
};

// An instruction's name, cut at its points.
struct Name {
  std::string operation;
  std::vector<std::string> modifiers;
  std::string whole;

  bool has(const char* modifier) const {
    for (const std::string& m : modifiers)
      if (m == modifier) return true;
    return false;
  }
  const std::string& type() const { return modifiers.back(); }
};

enum Slot : uint32_t {  // every kernel's first slots
  kTrue, kSink, kTidX, kTidY, kTidZ, kCtaX, kCtaY, kCtaZ, kNtidX, kNtidY, kNtidZ, kNctaX, kNctaY, kNctaZ, kLaneId, kLanesBelow,
  kDynamicBytes, kDynamicShared, kParameters, kLocal, kFirstFree
};

struct Parameter {
  uint32_t offset, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<uint64_t> slots;  // what a thread starts with
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
};

[[noreturn]] void die(const std::string& what);

// The families of instructions. Each gives the handler, or null for a name that is not its own; `variant` is set.
Handler integers(const Name& name, Instruction& x);
Handler floats(const Name& name, Instruction& x);
Handler choices(const Name& name, Instruction& x);  // moves, comparisons, selections
Handler conversions(const Name& name, Instruction& x);
Handler memory(const Name& name, Instruction& x);
Handler cooperation(const Name& name, Instruction& x);  // branches, barriers, collectives

void parse(const std::string& path, std::map<std::string, Kernel>& kernels);

constexpr uint64_t kSharedWindow = uint64_t{1} << 60;

}  // namespace ptx
}  // namespace simt
