// Tests that run on the CPU's implementations and, where there is a GPU, on those for CUDA.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "property/running.h"

namespace kda::test {

/// A fixture whose tests run once a device. Those for CUDA skip without one and say why.
class PerDevice : public testing::TestWithParam<DeviceType> {
 protected:
  void SetUp() override;

  /// The families of implementations for the device.
  static std::vector<std::string> tested_families();

  /// The same for tests that decode: on CUDA also with the fastest kernel that takes a problem.
  static std::vector<std::string> tested_decoders();

  /// Every implementation is within the limits of 7.3 of the float64 recurrence, forward and
  /// backward, with the public dtypes and with fp32 results.
  static void expect_right(const cases::Case& c, const std::string& what = "");
};

inline std::string device_type_name(const testing::TestParamInfo<DeviceType>& info) {
  return std::string(name_of(info.param));
}

/// The devices that this build has implementations for.
std::vector<DeviceType> devices_of_build();

/// Instances for them: All/Suite.Test/cpu and All/Suite.Test/cuda.
#define KDA_FOR_EACH_DEVICE(suite) \
  INSTANTIATE_TEST_SUITE_P(All, suite, testing::ValuesIn(devices_of_build()), device_type_name)

}  // namespace kda::test
