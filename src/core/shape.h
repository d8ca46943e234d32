// Arithmetic on layouts, shared by problem.cpp and validate.cpp.
#pragma once

#include <cstdint>
#include <string_view>

#include "kda/problem.h"

namespace kda {

/// The extent behind one letter of a TensorSpec shape, for example "HV", "NC" or "N+1".
int64_t extent_of(const Problem& problem, std::string_view letter);

/// What Problem::make gives a required tensor under a rule.
DType default_dtype(DTypeRule rule, DType io);

/// Product of sizes that are not negative; past the largest int64, that value.
int64_t saturating_product(int64_t a, int64_t b);

/// The functions below look at the first four dimensions at most, whatever the rank says.
void set_contiguous_strides(TensorLayout& layout);

/// Elements in the shape; 0 if any extent is 0.
int64_t count_elements(const TensorLayout& layout);

/// Elements from the first to the last one touched, strides counted; 0 if any extent is 0.
int64_t span_elements(const TensorLayout& layout);

}  // namespace kda
