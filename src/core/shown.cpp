#include "core/shown.h"

#include <fmt/format.h>

namespace kda {

std::string shown(std::string_view text) {
  constexpr std::size_t kMost = 60;
  std::string line;
  for (const char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    line += byte >= 0x20 && byte < 0x7F ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  if (text.size() > kMost) line += fmt::format("... ({} bytes)", text.size());
  return line;
}

}  // namespace kda
