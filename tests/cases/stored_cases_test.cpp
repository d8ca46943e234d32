// Every stored case on every family of implementations, held to the limits of 7.3.
//
// Cases: tests/data, and the folders of $KDA_CASES_DIR or of ../shared/cases beside the sources.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include <gtest/gtest.h>

#include "check.h"
#include "kda/backend.h"

namespace kda::cases {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> case_files() {
  const char* given = std::getenv("KDA_CASES_DIR");
  const fs::path more = given != nullptr ? given : KDA_SHARED_CASES;
  std::set<std::string> names;  // a case may lie in both places
  std::vector<std::string> files;
  for (const fs::path& folder : {fs::path(KDA_TEST_DATA), more}) {
    std::error_code missing;
    for (const auto& entry : fs::recursive_directory_iterator(folder, missing)) {
      const fs::path& path = entry.path();
      if (path.extension() == ".safetensors" && names.insert(path.stem().string()).second) {
        files.push_back(path.string());
      }
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// The families that run a whole case on the CPU, and "cuda" where there is a device for it.
std::vector<std::string> families() {
  std::set<std::string> forward;
  std::set<std::string> both;
  for (const ImplementationInfo& info : implementations()) {
    if (info.device != DeviceType::kCpu) continue;
    if (info.operation == Operation::kChunkForward) forward.insert(std::string(info.family));
  }
  for (const ImplementationInfo& info : implementations()) {
    const std::string family(info.family);
    if (info.operation == Operation::kChunkBackward && forward.count(family) != 0) {
      both.insert(family);
    }
  }
  if (cuda_unavailable_reason().empty()) both.insert("cuda");
  return {both.begin(), both.end()};
}

using Parameter = std::tuple<std::string, std::string>;

std::string parameter_name(const testing::TestParamInfo<Parameter>& info) {
  std::string name = fs::path(std::get<0>(info.param)).stem().string();
  name += "_";
  name += std::get<1>(info.param);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

class StoredCase : public testing::TestWithParam<Parameter> {};

TEST_P(StoredCase, IsRight) {
  const auto& [path, family] = GetParam();
  Result<Case> c = load_case(path);
  ASSERT_TRUE(c.ok()) << c.status().message();
  Options options;
  options.implementation = family;
  const Device device{family == "cuda" ? DeviceType::kCuda : DeviceType::kCpu, 0};
  Result<std::vector<CheckedOutput>> checked = check_case(*c, device, options);
  ASSERT_TRUE(checked.ok()) << checked.status().message();
  EXPECT_EQ(checked->size(), c->expected.size());
  for (const CheckedOutput& row : *checked) {
    const Difference& d = row.difference;
    EXPECT_TRUE(row.pass) << row.implementation << " " << name_of(row.id) << ": ratio " << d.ratio
                          << ", block ratio " << d.block_ratio << ", max error " << d.max_error
                          << ", limit " << row.limit << (d.finite ? "" : ", not finite");
  }
}

INSTANTIATE_TEST_SUITE_P(All, StoredCase,
                         testing::Combine(testing::ValuesIn(case_files()),
                                          testing::ValuesIn(families())),
                         parameter_name);

TEST(StoredCases, AreThere) { EXPECT_GE(case_files().size(), 8U); }

}  // namespace
}  // namespace kda::cases
