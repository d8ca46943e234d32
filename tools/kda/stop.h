// Ends a long run early, with what it has found so far.
#pragma once

namespace kda::program {

/// From here on the first SIGINT or SIGTERM only asks to stop; a second one ends the process at
/// once. A signal that was ignored stays so.
void stop_on_signals();

/// Whether one of them came.
bool stop_wanted();

}  // namespace kda::program
