// How many threads of OpenMP a run may use.
#pragma once

namespace kda::cpu {

/// `wanted`; 1 in a child made by fork after this process ran with several. The runtime's waiting
/// threads are not in the child, but libgomp would wait for them.
int team_size(int wanted);

}  // namespace kda::cpu
