// Lists that a host cannot check before a run on a device: wrong ones must do no harm.
#pragma once

#include <optional>

#include "stress/judge.h"

namespace kda::stress {

struct WrongList {
  TensorId id;  ///< the list
  cases::TensorMap inputs;
};

/// The inputs with an entry of cu_seqlens, state_indices or num_accepted out of its range; none if
/// there is no entry whose value counts.
std::optional<WrongList> with_wrong_list(const Trial& trial);

}  // namespace kda::stress
