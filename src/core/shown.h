// Text of a caller inside a message.
#pragma once

#include <string>
#include <string_view>

namespace kda {

/// Printable ASCII as it is, every other byte as \xNN, and no more than the first 60 bytes: the
/// message stays one short line whatever was given.
std::string shown(std::string_view text);

}  // namespace kda
