// Holding a family of implementations to what is right.
#pragma once

#include <string>

#include "property/running.h"
#include "support/per_family.h"

namespace kda::test {

class Judged : public PerFamily {
 protected:
  /// The case that a spec makes, fitted to the family.
  Case make(const CaseSpec& spec) const { return cases::generate(fitted(spec)); }

  /// Forward and, with `do`, backward by the family.
  TensorMap results_of(const Case& c, OutputTypes types = {}) const {
    return run_case(c, family(), types);
  }
  TensorMap results_of(const Problem& problem, const TensorMap& inputs) const {
    return run_operation(problem, inputs, choosing(family()));
  }

  /// Either direction is within the limits of 7.3 of the float64 recurrence, with the public dtypes
  /// and, where the family writes them, with fp32 results.
  /// `spec`: what generated the case.
  void expect_right(const Case& c, const std::string& what = "",
                    const CaseSpec* spec = nullptr) const;
  /// The same with results of given types, beside what is expected of them.
  void expect_right(const Case& c, OutputTypes types, const TensorMap& expected,
                    const std::string& what, const CaseSpec* spec = nullptr) const;

  /// "" or the outputs that are not: those of Hopper rows, which compute with operands of q's
  /// dtype, are held to its row of 7.3 and get another look as those of kda verify; on CUDA a
  /// decay is the difference of two sums gamma in fp32, whose rounding counts (7.3).
  std::string beyond(const Case& c, const TensorMap& results, const TensorMap& expected,
                     const CaseSpec* spec = nullptr) const;

  /// "" or what a float64 model that rounds gamma alone does not explain.
  std::string beyond_gamma(const Case& c, const TensorMap& results,
                           const TensorMap& expected) const;

  /// A limit for fp32 arithmetic, or the one of 7.3 for the operands of Hopper rows.
  double limit(double for_fp32, TensorId id) const;
};

}  // namespace kda::test
