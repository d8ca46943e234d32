// What the tests of the Hopper rows share: how a row runs, and what its results are held to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "case.h"
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

/// Rows begin .. end - 1 of dimension `dim`, of extent 1 in the dimensions before it.
cases::HostTensor part_of(const cases::HostTensor& t, std::size_t dim, int64_t begin, int64_t end);

}  // namespace kda::test
