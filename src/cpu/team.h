// How many threads of OpenMP a run may use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kda::cpu {

/// `wanted`; 1 in a child made by fork after this process ran with several. The runtime's waiting
/// threads are not in the child, but libgomp would wait for them.
int team_size(int wanted);

/// As many of `threads` as keep to a limit of bytes (0: none) with `each` beside `shared` ones; at
/// least one.
int threads_within(std::size_t limit, int threads, int64_t shared, int64_t each);

}  // namespace kda::cpu
