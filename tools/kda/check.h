// Holds what the library computes to the limits of docs/semantics.md 7.3.
#pragma once

#include <string>
#include <vector>

#include "case.h"
#include "compare.h"
#include "generate.h"
#include "kda/plan.h"

namespace kda::cases {

/// The verdict on one output of one case.
struct CheckedOutput {
  TensorId id;
  std::string implementation;
  Difference difference;
  /// Of `ratio`; of `max_error` if the output is float64 (`exact`).
  double limit = 0;
  bool exact = false;
  bool pass = false;
};

/// What rounding alone makes of an ill-conditioned case (6.4) on a 16-bit path: the outputs of the
/// emulated w/u form in the case's chunks. Empty for other cases and dtypes.
TensorMap emulated_rounding(const Case& c, DType io);
/// The same of any case and a 16-bit dtype.
TensorMap rounding_of(const Case& c, DType io);
/// What is left of it in fp32 where keys repeat and beta is near 2: every element of L has a random
/// error of the size that a sum of K products in one chain has, and nothing else is rounded.
TensorMap score_errors_of(const Case& c);
/// The same of deep gates, where gamma is rounded to fp32 and nothing else is: 2^-13 of a decay
/// where all tokens of a chunk of 64 are clamped.
TensorMap gamma_errors_of(const Case& c);

/// The largest ratio of an output that counts as right: the row of `io` in 7.3 or, where `emulated`
/// has the output, kRoundingFactor times its error if that is more.
double limit_beside(const TensorMap& emulated, const Case& c, TensorId id, const HostTensor& want,
                    DType io);
inline constexpr double kRoundingFactor = 1.5;

/// Another look at a 16-bit output that failed, as at random problems (7.3): beside rounding_of,
/// and where `spec` generated the case beside the usual size of what is a draw. Sets difference,
/// limit and pass.
void look_again(const Case& c, const CaseSpec* spec, const HostTensor& result,
                const HostTensor& want, DType io, CheckedOutput& checked);
/// The same beside other results of a model: emulated_rounding, where ordinary families have 7.3
/// alone.
void look_again_beside(const TensorMap& emulated, const Case& c, const CaseSpec* spec,
                       const HostTensor& result, const HostTensor& want, DType io,
                       CheckedOutput& checked);

/// Runs the case and compares every output with `expected`, or with the float64 reference where
/// the case has none. On the CPU outputs are fp32 and held to the fp32 row, or fp64 and held to the
/// float64 row if the float64 reference is what runs; on CUDA outputs have their public dtypes and
/// the row of q's dtype; ill-conditioned cases are held to
/// limit_beside(emulated_rounding). `spec`: what generated the case; its 16-bit outputs that fail
/// are held like random problems (7.3), which takes further draws of it.
Result<std::vector<CheckedOutput>> check_case(const Case& c, const Device& device,
                                              const Options& options,
                                              const CaseSpec* spec = nullptr);

}  // namespace kda::cases
