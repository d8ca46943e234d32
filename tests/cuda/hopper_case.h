// What the tests of the Hopper rows share: how a row runs, and what its results are held to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "support/names.h"

namespace kda::test {

/// Two runs of a row that is chosen by name.
Conditions on_row(std::string_view row);

/// How far from the reference a tensor may be.
using Limit = std::function<double(TensorId id, const HostTensor& reference)>;

/// "" or what is further from `expected` than that, globally or in a block.
std::string beyond(const Limit& limit, const Case& c, const TensorMap& results,
                   const TensorMap& expected);

/// The limits of 7.3, for ill-conditioned families what rounding alone makes of the same inputs.
Limit limits_beside_rounding(const Case& c, DType io);

inline constexpr DType kBF16 = DType::kBF16;
inline constexpr DType kF16 = DType::kF16;

/// A case with gradients, and one of the forward alone.
CaseSpec spec_of(Sizes sizes, DType io = kBF16, Family family = Family::kUnit);
CaseSpec forward_spec(Sizes sizes, DType io = kBF16, Family family = Family::kUnit);

/// o, final_state and h of a case; all in fp64 for the reference.
Problem forward_with_states(const Case& c, bool exact);

/// "" or how far the results of forward_with_states are beyond limits_beside_rounding.
std::string beyond_forward_limits(const Case& c, DType io, const TensorMap& results);

/// A case on sm90_chunk_fwd, in guarded memory and as a graph. in_place: initial_state and
/// final_state are the same memory.
void expect_right_forward(const CaseSpec& spec, bool in_place = false);

}  // namespace kda::test
