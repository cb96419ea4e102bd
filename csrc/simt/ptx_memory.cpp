// Loads, stores, atomics, addresses and asynchronous copies.
#include <set>

#include "simt/block.h"
#include "simt/ptx_values.h"
#include "simt/simt.h"

namespace simt::ptx {

enum class Space { host, shared, generic };  // host: global, local, constant and parameter memory

template <Space space>
void* locate(const Instruction& x, uint64_t address, size_t bytes) {
  bool shared = space == Space::shared;
  if (space == Space::generic && address - kSharedWindow < (uint64_t{1} << 24)) shared = true, address -= kSharedWindow;
  if (address % bytes) fail(x.place, "misaligned address 0x%llx: %s", static_cast<unsigned long long>(address), x.text.c_str());
  if (!shared) return reinterpret_cast<void*>(address);
  address &= 0xffffffff;
  if (address + bytes > shared_dynamic_bytes())
    fail(x.place, "%zu bytes at %llu of %zu in shared memory: %s", bytes, static_cast<unsigned long long>(address), shared_dynamic_bytes(),
         x.text.c_str());
  return static_cast<char*>(shared_dynamic()) + address;
}

// variant: elements, in neighbouring places.
template <class T, Space space>
const Instruction* load(const Instruction& x, uint64_t* s) {
  const size_t bytes = sizeof(T) * static_cast<size_t>(x.variant);
  const void* from = locate<space>(x, s[x.base] + static_cast<uint64_t>(x.offset), bytes);
  race::reads(from, bytes);
  for (int i = 0; i < x.variant; ++i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(from) + sizeof(T) * i, sizeof value);
    set<T>(s, x.to[i], value);
  }
  return &x + 1;
}

template <class T, Space space>
const Instruction* store(const Instruction& x, uint64_t* s) {
  const size_t bytes = sizeof(T) * static_cast<size_t>(x.variant);
  void* to = locate<space>(x, s[x.base] + static_cast<uint64_t>(x.offset), bytes);
  race::writes(to, bytes);
  for (int i = 0; i < x.variant; ++i) {
    const T value = get<T>(s, x.from[i]);
    std::memcpy(static_cast<char*>(to) + sizeof(T) * i, &value, sizeof value);
  }
  return &x + 1;
}

enum Atomic { kAdd, kMin, kMax, kAnd, kOr, kXor, kExchange, kCompareExchange };

template <class T, Space space>
const Instruction* atomic(const Instruction& x, uint64_t* s) {
  auto* at = static_cast<T*>(locate<space>(x, s[x.base] + static_cast<uint64_t>(x.offset), sizeof(T)));
  const T a = get<T>(s, x.from[0]), b = get<T>(s, x.from[1]);
  const T old = update(at, [&](T v) {
    switch (x.variant) {
      case kAdd: return static_cast<T>(static_cast<std::make_unsigned_t<T>>(v) + static_cast<std::make_unsigned_t<T>>(a));
      case kMin: return a < v ? a : v;
      case kMax: return a > v ? a : v;
      case kAnd: return static_cast<T>(v & a);
      case kOr: return static_cast<T>(v | a);
      case kXor: return static_cast<T>(v ^ a);
      case kExchange: return a;
      default: return v == a ? b : v;
    }
  });
  if (x.results) set<T>(s, x.to[0], old);
  return &x + 1;
}

template <class T, Space space>
Handler access(const std::string& operation) {
  if (operation == "ld" || operation == "ldu") return load<T, space>;
  if (operation == "st") return store<T, space>;
  if constexpr (sizeof(T) >= 4) return atomic<T, space>;
  return nullptr;
}

template <class T>
Handler access(const std::string& operation, Space space) {
  if (space == Space::host) return access<T, Space::host>(operation);
  if (space == Space::shared) return access<T, Space::shared>(operation);
  return access<T, Space::generic>(operation);
}

// ld.global.nc.v4.u32: every part but the type.
static bool understood(const std::string& part, Instruction& x, Space& space) {
  static const std::map<std::string, Space> spaces = {{"global", Space::host}, {"local", Space::host},   {"param", Space::host},
                                                      {"const", Space::host},  {"shared", Space::shared}, {"shared::cta", Space::shared}};
  static const std::map<std::string, int> operations = {{"add", kAdd}, {"min", kMin}, {"max", kMax},       {"and", kAnd},
                                                        {"or", kOr},   {"xor", kXor}, {"exch", kExchange}, {"cas", kCompareExchange}};
  static const std::set<std::string> hints = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "cta", "gpu", "sys"};
  if (const auto found = spaces.find(part); found != spaces.end())
    space = found->second;
  else if (const auto operation = operations.find(part); operation != operations.end())
    x.variant = operation->second;
  else if (part == "v2" || part == "v4")
    x.variant = part[1] - '0';
  else
    return hints.count(part) || part.compare(0, 4, "L1::") == 0 || part.compare(0, 4, "L2::") == 0;
  return true;
}

// ---- asynchronous copies, and addresses

static const Instruction* copy(const Instruction& x, uint64_t* s) {
  const auto bytes = get<int32_t>(s, x.from[1]);
  const int valid = x.sources == 3 ? get<int32_t>(s, x.from[2]) : bytes;
  void* to = locate<Space::shared>(x, s[x.base] + static_cast<uint64_t>(x.offset), static_cast<size_t>(bytes));
  copy_async(to, reinterpret_cast<const void*>(s[x.from[0]] + static_cast<uint64_t>(x.source_offset)), bytes, valid, x.place);
  return &x + 1;
}
static const Instruction* commit(const Instruction& x, uint64_t*) {
  copy_async_commit(x.place);
  return &x + 1;
}
static const Instruction* wait_for_copies(const Instruction& x, uint64_t* s) {
  copy_async_wait(get<int32_t>(s, x.from[0]), x.place);
  return &x + 1;
}
static const Instruction* same_address(const Instruction& x, uint64_t* s) {
  s[x.to[0]] = s[x.from[0]];
  return &x + 1;
}
static const Instruction* shared_to_generic(const Instruction& x, uint64_t* s) {
  s[x.to[0]] = s[x.from[0]] + kSharedWindow;
  return &x + 1;
}
static const Instruction* generic_to_shared(const Instruction& x, uint64_t* s) {
  s[x.to[0]] = s[x.from[0]] - kSharedWindow;
  return &x + 1;
}

static const Instruction* load_matrices(const Instruction& x, uint64_t* s) {  // variant: matrices, 8: transposed
  const int count = x.variant & 7;
  const void* row = lane() < 8 * count ? locate<Space::shared>(x, s[x.base] + static_cast<uint64_t>(x.offset), 16) : shared_dynamic();
  uint32_t out[4];
  simt::load_matrices(out, row, count, x.variant & 8, x.place);
  for (int i = 0; i < count; ++i) set(s, x.to[i], out[i]);
  return &x + 1;
}

Handler memory(const Name& name, Instruction& x) {
  const std::string& operation = name.operation;
  if (operation == "cvta") {
    const bool shared = name.has("shared") || name.has("shared::cta");
    return !shared ? same_address : name.has("to") ? generic_to_shared : shared_to_generic;
  }
  if (name.whole == "cp.async.commit_group") return commit;
  if (name.whole == "cp.async.wait_group") return wait_for_copies;
  if (name.whole.compare(0, 9, "cp.async.") == 0 && (name.has("cg") || name.has("ca")) && name.has("global")) return copy;
  if (operation == "ldmatrix") {
    if (!name.has("m8n8") || !name.has("b16")) return nullptr;
    x.variant = (name.has("x4") ? 4 : name.has("x2") ? 2 : 1) | (name.has("trans") ? 8 : 0);
    return load_matrices;
  }
  static const std::set<std::string> accesses = {"ld", "ldu", "st", "atom", "red"};
  if (!accesses.count(operation) || name.modifiers.empty()) return nullptr;
  Space space = Space::generic;
  x.variant = operation == "atom" || operation == "red" ? -1 : 1;
  for (size_t i = 0; i + 1 < name.modifiers.size(); ++i)
    if (!understood(name.modifiers[i], x, space)) return nullptr;
  if (x.variant < 0) return nullptr;
  std::string type = name.type();
  if (operation == "ld" || operation == "ldu" || operation == "st") {  // floats are bits here
    if (type == "f32") type = "b32";
    if (type == "f64") type = "b64";
  }
  return with_integer(type, [&](auto zero) { return access<decltype(zero)>(operation, space); });
}

}  // namespace simt::ptx
