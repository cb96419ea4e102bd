#include "simt/ptx_words.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>

namespace simt::ptx {

static bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '.' || c == '%'; }

std::vector<Token> lex(const std::string& text) {
  std::vector<Token> tokens;
  int line = 1;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    size_t end = at + 1;
    if (text.compare(at, 2, "//") == 0) {
      end = std::min(text.find('\n', at), text.size());
    } else if (text.compare(at, 2, "/*") == 0) {
      end = std::min(text.find("*/", at), text.size()) + 2;
    } else if (c == '"') {
      end = text.find('"', at + 1) + 1;
      tokens.push_back({text.substr(at, end - at), line});
    } else if (is_word(c)) {  // level::modifier is one word
      while (end < text.size() && (is_word(text[end]) || text.compare(end, 2, "::") == 0)) end += text[end] == ':' ? 2 : 1;
      tokens.push_back({text.substr(at, end - at), line});
    } else if (!std::isspace(static_cast<unsigned char>(c))) {
      tokens.push_back({std::string(1, c), line});
    }
    end = std::min(end, text.size());
    line += static_cast<int>(std::count(text.begin() + at, text.begin() + end, '\n'));
    at = end;
  }
  return tokens;
}

uint32_t bytes_of(const std::string& type) {
  static const std::map<std::string, uint32_t> sizes = {{".b8", 1},  {".u8", 1},  {".s8", 1},  {".b16", 2}, {".u16", 2}, {".s16", 2},
                                                        {".f16", 2}, {".b32", 4}, {".u32", 4}, {".s32", 4}, {".f32", 4}, {".b64", 8},
                                                        {".u64", 8}, {".s64", 8}, {".f64", 8}, {".pred", 1}};
  const auto found = sizes.find(type);
  return found == sizes.end() ? 0 : found->second;
}

uint64_t number(const std::string& text, bool negative) {
  const bool bits = text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D');
  const uint64_t value = std::strtoull(text.c_str() + (bits ? 2 : 0), nullptr, bits ? 16 : 0);
  return negative ? uint64_t{0} - value : value;
}

}  // namespace simt::ptx
