#include "support/per_family.h"

#include <algorithm>

#include "kda/backend.h"
#include "support/calls.h"

namespace kda::test {
namespace {

/// Rows that need aligned addresses say so at the run, which alone knows them (docs/api.md).
bool is_refusal(const Status& status) {
  return status.code() == StatusCode::kUnsupported ||
         (status.code() == StatusCode::kInvalidArgument &&
          status.message().find("expected a multiple of 16 for sm90_") != std::string::npos);
}

/// "" or why this machine or build has no Hopper rows.
std::string no_hopper() {
  const Problem problem = Problem::make(
      Operation::kChunkForward, {.B = 1, .T = 64, .H = 1, .HV = 1, .K = 64, .V = 64}, DType::kBF16);
  return supports(problem, {DeviceType::kCuda, 0}, {"sm90", 0}).message();
}

}  // namespace

void PerFamily::SetUp() {
  if (on_cpu()) return;
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  if (!is_hopper()) return;
  if (const std::string reason = no_hopper(); !reason.empty()) GTEST_SKIP() << reason;
}

void PerFamily::attempt(const std::function<void()>& part) const {
  try {
    part();
  } catch (const Error& error) {
    if (!is_hopper() || !is_refusal(error.status())) throw;
    count_refusal(family(), error.status().message());
  }
}

CaseSpec PerFamily::fitted(CaseSpec spec) const {
  if (!is_hopper()) return spec;
  if (spec.io == DType::kF32) spec.io = DType::kBF16;
  spec.sizes.K = spec.sizes.K <= 64 ? 64 : 128;
  spec.sizes.V = (spec.sizes.V + 63) / 64 * 64;
  return spec;
}

CaseSpec PerFamily::fitted_to_decode(CaseSpec spec, int64_t fewest_tokens) const {
  if (!is_hopper()) return spec;
  constexpr int64_t kManyStates = 160;
  constexpr int64_t kManyTokens = 4;
  if (spec.io == DType::kF32) spec.io = DType::kBF16;
  spec.sizes.K = spec.sizes.V = 128;
  if (fewest_tokens >= kManyTokens) return spec;
  spec.sizes.HV = std::max(spec.sizes.HV, spec.sizes.H * (kManyStates / spec.sizes.H));
  return spec;
}

std::vector<std::string> families_of_build(bool cuda_alone) {
  std::vector<std::string> found;
  for (const ImplementationInfo& row : implementations()) {
    const std::string family(row.family);
    if (cuda_alone && row.device != DeviceType::kCuda) continue;
    if (std::find(found.begin(), found.end(), family) == found.end()) found.push_back(family);
  }
  return found;
}

}  // namespace kda::test
