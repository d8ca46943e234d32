// A problem cut into slices of heads and of sequences: neither meet, so that a slice is a problem
// of its own on the same memory, and slices one after the other need the workspace of one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kda/plan.h"
#include "kda/problem.h"

namespace kda {

/// Into how many slices of heads a problem is cut, and each of them into how many of sequences.
struct Cut {
  int64_t heads = 1;
  int64_t sequences = 1;

  int64_t slices() const { return heads * sequences; }
  friend bool operator==(const Cut&, const Cut&) = default;
};

/// The finest cut: slices of one key head with its value heads, or of one value head where no
/// tensor has key heads, and of one sequence. Packed sequences, whose B is 1, stay together: where
/// they begin is known at the run only.
Cut finest_cut(const Problem& problem);

struct Slice {
  Problem problem;
  std::array<int64_t, kTensorCount> offset{};  ///< of each tensor, in bytes
  int64_t first_sequence = 0;
  int64_t all_sequences = 1;  ///< of the batch that it is a part of

  /// No later slice has the same heads.
  bool ends_batch() const { return first_sequence + problem.sizes.B == all_sequences; }
  /// The arguments of the whole problem, for this slice.
  Args narrow(Args args) const;
};

/// Slice `index` of a cut of a validated problem, as even as whole heads and sequences allow: all
/// sequences of the first heads, then those of the next. The last one is the largest.
Slice slice_of(const Problem& problem, const Cut& cut, int64_t index);

/// All of them.
std::vector<Slice> slices_of(const Problem& problem, const Cut& cut);

/// The workspace of a slice in bytes, if they can be counted.
using SliceWorkspace = std::function<Result<std::size_t>(const Slice&)>;

/// The cut into fewest slices that keep to the limit; the finest one if none does. Of as many
/// slices those with more heads, which lie closer together in memory.
Cut cut_to_limit(const Problem& problem, std::size_t limit, const SliceWorkspace& workspace);

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
