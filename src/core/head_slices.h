// A problem cut into slices of heads: heads never meet, so that a slice is a problem of its own on
// the same memory, and slices one after the other need the workspace of one.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kda/plan.h"
#include "kda/problem.h"

namespace kda {

struct HeadSlice {
  Problem problem;
  std::array<int64_t, kTensorCount> offset{};  ///< of each tensor, in bytes

  /// The arguments of the whole problem, for this slice.
  Args narrow(Args args) const;
};

/// Slice `index` of `count` of a validated problem, as even as whole key heads allow, with the
/// value heads that belong to them. The last one has most heads.
HeadSlice head_slice(const Problem& problem, int64_t index, int64_t count);

/// All of them.
std::vector<HeadSlice> slice_heads(const Problem& problem, int64_t count);

/// What decides how many slices two scans side by side, one block each for a sequence and value
/// head, and what follows them are worth.
struct SliceCosts {
  int64_t heads;            ///< that can be told apart: key heads
  int64_t workspace;        ///< bytes of all heads at once
  int64_t limit;            ///< bytes that a slice should keep to
  int64_t blocks_per_head;  ///< of both scans
  int64_t sms;
};

/// The fewest waves of blocks among the counts from the first that keeps to the limit to twice as
/// many; the smaller one of equals.
int64_t count_slices(const SliceCosts& costs);

}  // namespace kda
