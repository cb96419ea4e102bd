// PTX's text to instructions.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "simt/ptx.h"
#include "simt/ptx_words.h"

namespace simt::ptx {

static uint32_t round_up(uint32_t value, uint32_t step) { return (value + step - 1) / step * step; }

struct Variable {
  std::string name;
  uint32_t alignment = 1, item = 0, count = 1;
  bool open = false;  // name[]: dynamic shared memory
};

class Parser {
 public:
  Parser(const std::string& path, std::map<std::string, Kernel>& kernels) : path_(path), kernels_(kernels) {
    std::ifstream file(path);
    if (!file) die("cannot open " + path);
    std::stringstream text;
    text << file.rdbuf();
    tokens_ = lex(text.str());
  }

  void module() {
    while (at_ < tokens_.size()) {
      const std::string word = next();
      if (word == ".version" || word == ".address_size" || word == ".target") {
        next();
        while (eat(",")) next();
      } else if (word == ".shared") {
        place_shared(variable(), file_shared_, file_symbols_);
        need(";");
      } else if (word == ".global" || word == ".const") {
        constant();
      } else if (word == ".entry") {
        entry();
      } else if (word != ".visible" && word != ".extern" && word != ".weak") {
        refuse("'" + word + "' outside of kernels");
      }
    }
  }

 private:
  // ---- tokens
  const std::string& peek(size_t ahead = 0) const {
    static const std::string none;
    return at_ + ahead < tokens_.size() ? tokens_[at_ + ahead].text : none;
  }
  std::string next() {
    if (at_ >= tokens_.size()) refuse("unexpected end");
    return tokens_[at_++].text;
  }
  bool eat(const char* text) {
    if (peek() != text) return false;
    ++at_;
    return true;
  }
  void need(const char* text) {
    if (!eat(text)) refuse(std::string("wanted '") + text + "', got '" + peek() + "'");
  }
  [[noreturn]] void refuse(const std::string& what) const {
    die(path_ + ":" + std::to_string(at_ < tokens_.size() ? tokens_[at_].line : 0) + ": " + what);
  }

  // ---- declarations: .align N .type name[count][count]
  Variable variable() {
    Variable v;
    while (peek()[0] == '.') {
      const std::string word = next();
      if (word == ".align")
        v.alignment = static_cast<uint32_t>(number(next(), false));
      else if (bytes_of(word))
        v.item = bytes_of(word);
      else if (word != ".ptr" && word != ".global" && word != ".const")  // what a parameter points to
        refuse("'" + word + "' in a declaration");
    }
    v.alignment = std::max(v.alignment, v.item);
    v.name = next();
    while (eat("[")) {
      v.open = peek() == "]";
      if (!v.open) v.count *= static_cast<uint32_t>(number(next(), false));
      need("]");
    }
    return v;
  }

  void place_shared(const Variable& v, uint32_t& used, std::map<std::string, uint32_t>& symbols) {
    if (v.open) {
      dynamic_shared_ = v.name;
      return;
    }
    used = round_up(used, v.alignment);
    symbols[v.name] = used;
    used += v.item * v.count;
  }

  // A table of a module lives as long as the program.
  void constant() {
    const Variable v = variable();
    auto* memory = new std::vector<uint64_t>((v.item * v.count + 7) / 8 + 1);
    char* out = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(memory->data()) + 15) / 16 * 16);
    if (v.alignment > 16 || v.open) refuse("'" + v.name + "': this table is not supported");
    if (eat("=")) {
      const bool list = eat("{");
      do {
        const bool negative = eat("-");
        const uint64_t value = number(next(), negative);
        std::memcpy(out, &value, v.item);
        out += v.item;
      } while (list && eat(","));
      if (list) need("}");
      out = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(memory->data()) + 15) / 16 * 16);
    }
    need(";");
    tables_[v.name] = reinterpret_cast<uint64_t>(out);
  }

  // ---- kernels
  void entry() {
    const std::string name = next();
    kernel_ = &(kernels_[name] = Kernel());
    kernel_->name = name;
    kernel_->slots.assign(kFirstFree, 0);
    kernel_->slots[kTrue] = 1;
    scopes_.assign(1, {}), constants_.clear(), labels_.clear(), jumps_.clear(), lists_.clear(), parameters_.clear();
    symbols_ = file_symbols_;
    shared_ = file_shared_;
    parameters();
    while (peek() != "{") next();  // .maxntid and its kind
    body();
    for (const auto& [instruction, label] : jumps_) kernel_->code[instruction].target = label_at(label);
    for (const auto& [instruction, list] : table_jumps_)
      for (const std::string& label : lists_[list]) kernel_->code[instruction].targets.push_back(label_at(label));
    table_jumps_.clear();
    kernel_->shared_bytes = round_up(shared_, 128);
  }

  const Instruction* label_at(const std::string& label) const {
    const auto found = labels_.find(label);
    if (found == labels_.end()) refuse("no label " + label);
    return kernel_->code.data() + found->second;
  }

  void parameters() {
    if (!eat("(")) return;
    while (!eat(")")) {
      need(".param");
      const Variable v = variable();
      kernel_->parameter_bytes = round_up(kernel_->parameter_bytes, v.alignment);
      parameters_[v.name] = kernel_->parameter_bytes;
      kernel_->parameters.push_back({kernel_->parameter_bytes, v.item * v.count});
      kernel_->parameter_bytes += v.item * v.count;
      eat(",");
    }
  }

  void body() {
    need("{");
    for (int depth = 1; depth;) {
      if (eat("{")) {
        ++depth, scopes_.push_back({});
      } else if (eat("}")) {
        --depth, scopes_.pop_back();
      } else if (eat(".reg")) {
        registers();
      } else if (eat(".shared")) {
        place_shared(variable(), shared_, symbols_);
        need(";");
      } else if (eat(".local")) {
        const Variable v = variable();
        if (kernel_->local_bytes || v.alignment > 16) refuse("more than one local array");
        kernel_->local_bytes = v.item * v.count;
        local_ = v.name;
        need(";");
      } else if (eat(".pragma")) {
        next();
        need(";");
      } else if (peek(1) == ":") {
        label();
      } else {
        instruction();
      }
    }
  }

  void label() {
    const std::string name = next();
    need(":");
    if (!eat(".branchtargets")) {
      labels_[name] = kernel_->code.size();
      return;
    }
    do lists_[name].push_back(next());
    while (eat(","));
    need(";");
  }

  uint32_t slot(uint64_t value) {
    kernel_->slots.push_back(value);
    return static_cast<uint32_t>(kernel_->slots.size() - 1);
  }

  void registers() {  // .b32 %r<10>, %x;
    constexpr uint64_t kUnset = 0xdeadbeefdeadbeef;
    if (!bytes_of(next())) refuse("a register's type");
    do {
      const std::string name = next();
      if (!eat("<")) {
        scopes_.back()[name] = slot(kUnset);
        continue;
      }
      const auto count = number(next(), false);
      for (uint64_t i = 0; i < count; ++i) scopes_.back()[name + std::to_string(i)] = slot(kUnset);
      need(">");
    } while (eat(","));
    need(";");
  }

  uint32_t constant_slot(uint64_t value) {
    const auto [found, is_new] = constants_.emplace(value, 0);
    if (is_new) found->second = slot(value);
    return found->second;
  }

  // ---- operands
  uint32_t operand() {
    const bool negative = eat("-");
    const std::string word = next();
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto found = scope->find(word); found != scope->end()) return found->second;
    if (std::isdigit(static_cast<unsigned char>(word[0]))) return constant_slot(number(word, negative));
    static const std::map<std::string, uint32_t> special = {
        {"_", kSink},           {"%tid.x", kTidX},       {"%tid.y", kTidY},       {"%tid.z", kTidZ},     {"%ctaid.x", kCtaX},
        {"%ctaid.y", kCtaY},    {"%ctaid.z", kCtaZ},     {"%ntid.x", kNtidX},     {"%ntid.y", kNtidY},   {"%ntid.z", kNtidZ},
        {"%nctaid.x", kNctaX},  {"%nctaid.y", kNctaY},   {"%nctaid.z", kNctaZ},   {"%laneid", kLaneId},  {"%lanemask_lt", kLanesBelow},
        {"%dynamic_smem_size", kDynamicBytes}};
    if (const auto found = special.find(word); found != special.end()) return found->second;
    if (word == "WARP_SZ") return constant_slot(32);
    if (word == dynamic_shared_) return kDynamicShared;
    if (word == local_) return kLocal;
    if (const auto found = symbols_.find(word); found != symbols_.end()) return constant_slot(found->second);
    if (const auto found = tables_.find(word); found != tables_.end()) return constant_slot(found->second);
    refuse("unknown operand " + word);
  }

  uint32_t address(int64_t& offset) {  // [base + offset]
    need("[");
    offset = 0;
    uint32_t base = kParameters;
    if (const auto found = parameters_.find(peek()); found != parameters_.end()) {
      offset = found->second;
      next();
    } else {
      base = operand();
    }
    while (peek() == "+" || peek() == "-") {
      const bool minus = next() == "-", negative = eat("-");
      offset += static_cast<int64_t>(number(next(), minus != negative));
    }
    need("]");
    return base;
  }

  void operands(Instruction& x, const Name& name) {
    static const std::vector<std::string> no_result = {"st", "red", "bra", "brx", "cp", "ret", "exit", "trap"};
    const bool barrier = (name.operation == "bar" || name.operation == "barrier") && !name.has("red");
    const bool result = !barrier && std::find(no_result.begin(), no_result.end(), name.operation) == no_result.end();
    size_t to = 0, from = 0;
    const auto put = [&](uint32_t slot, bool is_result) {
      if ((is_result ? to : from) >= (is_result ? std::size(x.to) : std::size(x.from))) refuse("too many operands");
      (is_result ? x.to[to++] : x.from[from++]) = slot;
    };
    bool first = true;
    do {
      const bool is_result = first && result;
      first = false;
      if (peek() == "[" && !x.addressed) {
        x.base = address(x.offset), x.addressed = true;
      } else if (peek() == "[") {
        put(address(x.source_offset), false);
      } else if (eat("{")) {
        do put(operand(), is_result);
        while (eat(","));
        need("}");
      } else if (parameters_.count(peek())) {  // mov of a parameter's address: base + offset
        x.base = kParameters, x.offset = parameters_[next()], x.addressed = true;
      } else {
        put(operand(), is_result);
        if (eat("|")) put(operand(), is_result);
      }
    } while (eat(","));
    x.results = static_cast<int>(to), x.sources = static_cast<int>(from);
  }

  void instruction() {
    Instruction x;
    const size_t start = at_;
    x.place = {path_.c_str(), tokens_[at_].line};
    x.guard = kTrue;
    if (eat("@")) {
      x.wanted = eat("!") ? 0 : 1;
      x.guard = operand();
    }
    Name name;
    name.whole = next();
    std::stringstream parts(name.whole);
    std::getline(parts, name.operation, '.');
    for (std::string part; std::getline(parts, part, '.');) name.modifiers.push_back(part);
    if (name.operation == "bra") {
      jumps_.emplace_back(kernel_->code.size(), next());
    } else if (name.operation == "brx") {
      x.from[0] = operand();
      need(",");
      table_jumps_.emplace_back(kernel_->code.size(), next());
    } else if (peek() != ";") {
      operands(x, name);
    }
    need(";");
    for (size_t i = start; i + 1 < at_; ++i) x.text += tokens_[i].text + " ";
    for (const auto family : {integers, floats, choices, conversions, memory, cooperation})
      if (!x.run) x.run = family(name, x);
    if (!x.run) refuse("unsupported instruction: " + x.text);
    kernel_->code.push_back(std::move(x));
  }

  const std::string& path_;
  std::map<std::string, Kernel>& kernels_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  // of the file
  uint32_t file_shared_ = 0;
  std::string dynamic_shared_;
  std::map<std::string, uint32_t> file_symbols_;
  std::map<std::string, uint64_t> tables_;
  // of the kernel
  Kernel* kernel_ = nullptr;
  uint32_t shared_ = 0;
  std::string local_;
  std::vector<std::map<std::string, uint32_t>> scopes_;  // slots of registers, by block
  std::map<uint64_t, uint32_t> constants_;
  std::map<std::string, uint32_t> symbols_, parameters_;
  std::map<std::string, size_t> labels_;
  std::map<std::string, std::vector<std::string>> lists_;            // of branch targets
  std::vector<std::pair<size_t, std::string>> jumps_, table_jumps_;  // instruction, label
};

void parse(const std::string& path, std::map<std::string, Kernel>& kernels) {
  static std::vector<std::string*> paths;  // instructions keep pointing to theirs
  paths.push_back(new std::string(path));
  Parser(*paths.back(), kernels).module();
}

}  // namespace simt::ptx
