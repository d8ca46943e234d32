// Tests that run once for each family of implementations: reference, cpu, cuda, sm90.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kda/plan.h"
#include "support/names.h"

namespace kda::test {

/// Every call names the family, so that nothing falls back. Families for a GPU skip without one.
class PerFamily : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override;

  const std::string& family() const { return GetParam(); }
  bool is_reference() const { return family() == "reference"; }
  bool is_hopper() const { return family() == "sm90"; }
  bool on_cpu() const { return family() == "cpu" || is_reference(); }
  Device device() const { return {on_cpu() ? DeviceType::kCpu : DeviceType::kCuda, 0}; }
  Options options() const { return {family(), 0}; }

  /// Runs a part of a test. Hopper rows take some problems only: what they refuse is counted, with
  /// the reason, and the next part goes on. From any other family a refusal fails the test.
  void attempt(const std::function<void()>& part) const;

  /// The spec, for Hopper rows in the type and the sizes that they take.
  CaseSpec fitted(CaseSpec spec) const;
  /// The same for the recurrent operation, of which Hopper rows take K = V = 128, and calls of
  /// fewer than four tokens for many states at a time.
  CaseSpec fitted_to_decode(CaseSpec spec, int64_t fewest_tokens = 1) const;
};

/// The families that this build has rows of; those for CUDA alone, if wanted.
std::vector<std::string> families_of_build(bool cuda_alone = false);

inline std::string family_name(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}

/// Instances All/Suite.Test/cpu and so on.
#define KDA_FOR_EACH_FAMILY(suite) \
  INSTANTIATE_TEST_SUITE_P(All, suite, testing::ValuesIn(families_of_build()), family_name)
#define KDA_FOR_EACH_CUDA_FAMILY(suite) \
  INSTANTIATE_TEST_SUITE_P(All, suite, testing::ValuesIn(families_of_build(true)), family_name)

}  // namespace kda::test
