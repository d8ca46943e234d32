// Version of the headers. version() tells the version of the library that is linked.
#pragma once

#define KDA_VERSION_MAJOR 0
#define KDA_VERSION_MINOR 1
#define KDA_VERSION_PATCH 0

namespace kda {

/// For example "0.1.0".
const char* version();

}  // namespace kda
