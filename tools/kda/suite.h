// The built-in cases of `kda verify` and of the tests.
#pragma once

#include <vector>

#include "generate.h"

namespace kda::cases {

/// Every family with every gate, then the sizes, dtypes and options beside them. Small: the float64
/// reference takes seconds for all.
std::vector<CaseSpec> builtin_suite();

}  // namespace kda::cases
