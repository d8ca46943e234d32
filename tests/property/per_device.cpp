#include "property/per_device.h"

#include <algorithm>

#include "kda/backend.h"

namespace kda::test {

void PerDevice::SetUp() {
  if (GetParam() != DeviceType::kCuda) return;
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
}

std::vector<DeviceType> devices_of_build() {
  std::vector<DeviceType> found;
  for (const DeviceType type : {DeviceType::kCpu, DeviceType::kCuda}) {
    const auto rows = implementations();
    if (std::any_of(rows.begin(), rows.end(),
                    [&](const auto& row) { return row.device == type; })) {
      found.push_back(type);
    }
  }
  return found;
}

std::vector<std::string> PerDevice::tested_families() {
  return GetParam() == DeviceType::kCuda ? std::vector<std::string>{"cuda"} : families_of_cpu();
}

std::vector<std::string> PerDevice::tested_decoders() {
  std::vector<std::string> families = tested_families();
  if (GetParam() == DeviceType::kCuda) families.emplace_back("sm90,cuda");
  return families;
}

void PerDevice::expect_right(const cases::Case& c, const std::string& what) {
  const cases::TensorMap expected = cases::reference_outputs(c).value();
  for (const std::string& family : tested_families()) {
    EXPECT_EQ(beyond_limits(c, run_case(c, family), expected), "") << family << " " << what;
    EXPECT_EQ(beyond_limits(c, run_case(c, family, {DType::kF32}), expected), "")
        << family << " with fp32 results " << what;
  }
}

}  // namespace kda::test
