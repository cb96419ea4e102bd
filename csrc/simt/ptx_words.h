// The words of PTX's text.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace simt::ptx {

struct Token {
  std::string text;
  int line;
};

std::vector<Token> lex(const std::string& text);
uint32_t bytes_of(const std::string& type);  // ".u32" and so on; 0 for what is no type
// Numbers, and floats by their bits: 0f3F800000, 0d3FF0000000000000.
uint64_t number(const std::string& text, bool negative);

}  // namespace simt::ptx
