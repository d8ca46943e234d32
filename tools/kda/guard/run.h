// Runs one operation the way a careless program would: odd strides, unaligned tensors, memory full
// of NaN, and watches what it must not do.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "case.h"
#include "kda/plan.h"

namespace kda::cases {

/// How tensors lie in memory.
enum class Arrangement {
  kContiguous,  ///< as the sizes give, on 64-byte boundaries
  kPadded,      ///< gaps after every dimension, sometimes between elements; element alignment only
  kTransposed,  ///< as kPadded, with the dimensions in another order
  kAligned,     ///< views of wider rows: gaps of multiples of 16 bytes after the last dimension
  kShifted,     ///< as kAligned, from addresses with element alignment only
  kMixed,       ///< each tensor one of the others
};

/// What is held against a run.
enum class Watch {
  kAll,
  /// Some inputs are NaN. An output that is NaN because of them may have the bits that mark what
  /// nobody wrote, so elements that nobody wrote are not looked for.
  kNotUnwritten,
  /// Lists are wrong: only bytes beside the outputs count.
  kBounds,
};

struct Conditions {
  Options options;
  /// On a CUDA device there always is a second run, the replay of a captured graph.
  Device device;
  Arrangement arrangement = Arrangement::kContiguous;
  uint64_t seed = 1;            ///< of gaps, offsets and orders
  bool state_in_place = false;  ///< final_state is the memory of initial_state
  bool repeat = false;          ///< a second run must give the same bits
  int32_t repeat_threads = 0;   ///< CPU threads of that second run; 0: as many as in the first
  /// Share of the first run's workspace that the second may have at most, where the row that was
  /// named can do with so little; 0: as much.
  double repeat_workspace = 0;
  /// Values of the inputs on which the graph runs before the ones given, once it is captured.
  const TensorMap* earlier = nullptr;
  Watch watch = Watch::kAll;
  /// Dimensions of inputs that have stride 0. The values must not differ along them.
  std::vector<std::pair<TensorId, std::size_t>> repeated;
  int copies = 1;  ///< on a CUDA device: runs at once on streams of their own, with the same bits
};

struct GuardedOutcome {
  TensorMap outputs;
  std::string implementation;
};

/// The problem with the strides that its tensors have in such a run. Addresses are not in it.
Problem arranged(const Problem& problem, const Conditions& conditions);

/// The outputs; kInternal says which rule was broken (of those that `watch` leaves):
/// - outputs and workspace are full of NaN before the run, and every element is
///   written;
/// - nothing before, between or behind the elements of a tensor or the workspace is written;
/// - inputs keep every bit;
/// - a second run, if asked for, gives the same bits.
/// A pool behind state_indices needs `state_in_place`.
Result<GuardedOutcome> run_guarded(const Problem& problem, const TensorMap& inputs,
                                   const Conditions& conditions = {});

}  // namespace kda::cases
