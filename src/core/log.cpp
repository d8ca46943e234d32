#include "core/log.h"

#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>

namespace kda::log {
namespace {

bool requested(std::string_view word) {
  const char* value = std::getenv("KDA_LOG");
  return value != nullptr && std::string_view(value).find(word) != std::string_view::npos;
}

}  // namespace

bool dispatch_enabled() {
  static const bool enabled = requested("dispatch");
  return enabled;
}

bool exec_enabled() {
  static const bool enabled = requested("exec");
  return enabled;
}

void write(std::string_view text) {
  const std::string line = fmt::format("[kda] {}\n", text);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace kda::log
