// What the tests of the Hopper rows share: how a row runs, and what its results are held to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "case.h"
#include "generate.h"
#include "support/guarded_run.h"

namespace kda::test {

/// Two runs of a row that is chosen by name.
Conditions on_row(std::string_view row);

/// How far from the reference a tensor may be.
using Limit = std::function<double(TensorId id, const cases::HostTensor& reference)>;

/// "" or what is further from `expected` than that, globally or in a block.
std::string beyond(const Limit& limit, const cases::Case& c, const cases::TensorMap& results,
                   const cases::TensorMap& expected);

/// The limits of 7.3, for ill-conditioned families what rounding alone makes of the same inputs.
Limit limits_beside_rounding(const cases::Case& c, DType io);

/// A forward case.
cases::CaseSpec forward_spec(Sizes sizes, DType io = DType::kBF16,
                             cases::Family family = cases::Family::kUnit);

/// o, final_state and h of a case; all in fp64 for the reference.
Problem forward_with_states(const cases::Case& c, bool exact);

/// "" or how far the results of forward_with_states are beyond limits_beside_rounding.
std::string beyond_forward_limits(const cases::Case& c, DType io, const cases::TensorMap& results);

/// A case on sm90_chunk_fwd, in guarded memory and as a graph. in_place: initial_state and
/// final_state are the same memory.
void expect_right_forward(const cases::CaseSpec& spec, bool in_place = false);

}  // namespace kda::test
