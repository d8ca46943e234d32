// The built-in cases of `kda verify` and of the tests.
#pragma once

#include <vector>

#include "generate.h"

namespace kda::cases {

/// Every family with every gate, then the sizes, dtypes and options beside them. Small: the float64
/// reference takes a second for all. q, k, v have dtype `io` unless the dtype is what a case is
/// about. For 16-bit dtypes the families whose gradients are differences of nearly equal numbers
/// are left out (same, predicted): 16-bit operands cannot hold those limits
/// (docs/semantics.md 6.4).
std::vector<CaseSpec> builtin_suite(DType io = DType::kF32);

}  // namespace kda::cases
