// Random problems over the whole space of options, from a seed and a number.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "generate.h"
#include "guard/run.h"
#include "kda/problem.h"

namespace kda::stress {

/// One problem: what is asked for, what the inputs look like and how they lie in memory. It depends
/// on the seed and the number alone, not on machine, device or build.
struct Draw {
  uint64_t seed = 1;
  int64_t number = 0;
  /// Of the inputs. For stages q, k and beta are activated outside.
  cases::CaseSpec spec;
  /// The operation with every tensor that takes part.
  Problem problem;
  cases::Arrangement arrangement = cases::Arrangement::kContiguous;
  bool state_in_place = false;
  int32_t threads = 1;          ///< of the first run on the CPU
  int32_t repeat_threads = 1;   ///< of the second
  double repeat_workspace = 0;  ///< share of the workspace that the second run may have; 0: all
  int copies = 1;               ///< runs at once on a GPU
  /// A sequence that a further run fills with NaN and the like, to see that it harms no other; -1:
  /// no such run.
  int64_t dyed = -1;
  /// A further run gets a wrong cu_seqlens, state_indices or num_accepted.
  bool wrong_list = false;
  /// Dimensions along which an input repeats itself, by stride 0.
  std::vector<std::pair<TensorId, std::size_t>> repeated;
};

Draw draw(uint64_t seed, int64_t number);

/// How a run of it treats its tensors; the implementation and the device are the caller's.
cases::Conditions conditions_of(const Draw& draw);

/// The problem with fp32 for every output of 16 bits but a state that is updated in place; none if
/// that changes nothing.
std::optional<Problem> with_fp32_outputs(const Draw& draw);

/// One line: operation, family, sizes, options, tensors and arrangement.
std::string describe(const Draw& draw);

}  // namespace kda::stress
