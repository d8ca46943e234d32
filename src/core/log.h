// KDA_LOG: comma-separated list of `dispatch` (explains choices) and `exec` (times runs), on
// stderr.
#pragma once

#include <string_view>

namespace kda::log {

bool dispatch_enabled();
bool exec_enabled();
/// One line "[kda] text" to stderr, written at once.
void write(std::string_view text);

}  // namespace kda::log
