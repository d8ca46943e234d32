// How far a result is from what it should be.
#pragma once

#include <vector>

#include "case.h"
#include "tensor.h"

namespace kda::cases {

/// Where result or reference has NaN or infinity, the numbers that it enters are NaN or infinite.
struct Difference {
  /// (7.1): RMS(error) / (RMS(reference) + 1e-8) over the whole tensor.
  double ratio = 0;
  /// The worst of RMS(error in block) / max(RMS(reference in block), kBlockFloor RMS(reference)).
  double block_ratio = 0;
  /// max |error| / max |reference|, or max |error| if the reference is all zero.
  double max_error = 0;
  /// Whether result and reference are free of NaN and infinity.
  bool finite = true;
};

/// The share of the whole tensor's RMS that a block counts at least: a nearly silent block is held
/// to an absolute error, because rounding errors scale with the loud tokens that it reads.
inline constexpr double kBlockFloor = 0.25;
/// Tokens of a block.
inline constexpr int64_t kBlockTokens = 64;
/// A block may be this many times worse than the limit of the whole tensor (7.3 a).
inline constexpr double kBlockFactor = 4;

enum class ShortBlocks {
  kAlone,
  /// Blocks of fewer tokens, and states of fewer numbers, count together with those behind them:
  /// the error of one score multiplies a whole row of o, so that a ratio of few tokens is as large
  /// as its denominator happens to be small. For problems of every size.
  kPooled,
};

/// Compares an output with its expected values. A block is 64 tokens of one head, counted from the
/// start of each sequence; for states one (sequence, head); else the whole tensor. Tokens that no
/// sequence owns form blocks of their own.
Difference compare(const Case& c, TensorId id, const HostTensor& result, const HostTensor& expected,
                   ShortBlocks short_blocks = ShortBlocks::kAlone);

/// The rows of docs/semantics.md 7.3.
enum class Precision { kF64, kF32, kF16, kBF16 };

/// The row for results computed from tensors of this dtype.
Precision precision_of(DType io);

/// The largest ratio (for kF64: max_error) that counts as right.
double limit_of(Precision precision, TensorId id);

}  // namespace kda::cases
