#include "stress/wrong_list.h"

#include <limits>
#include <utility>
#include <vector>

#include "random.h"

namespace kda::stress {
namespace {

using cases::HostTensor;
using enum TensorId;

constexpr uint64_t kListStream = 400;  // beside those of inputs.cpp and dye.cpp

/// A value below `least` or above `most`, near or far.
int64_t outside(uint64_t bits, int64_t least, int64_t most, DType dtype) {
  const auto near = static_cast<int64_t>(bits / 4 % 3);
  switch (bits % 4) {
    case 0:
      return least - 1 - near;
    case 1:
      return dtype == DType::kI64 ? int64_t{1} << 40 : std::numeric_limits<int32_t>::max();
    default:
      return most + 1 + near;
  }
}

}  // namespace

std::optional<WrongList> with_wrong_list(const Trial& trial) {
  const Problem& problem = trial.draw.problem;
  const cases::Random random(trial.draw.spec.seed, kListStream);
  std::vector<TensorId> present;
  for (const TensorId id : {kCuSeqlens, kStateIndices, kNumAccepted}) {
    if (problem.has(id)) present.push_back(id);
  }
  WrongList wrong{present[random.bits(0) % present.size()], trial.inputs.inputs};
  HostTensor& list = wrong.inputs.at(wrong.id);
  const auto at = static_cast<int64_t>(random.bits(1) % static_cast<uint64_t>(list.count()));
  int64_t least = 0;
  int64_t most = problem.sizes.T;
  if (wrong.id == kStateIndices) {
    least = -1;
    most = problem.sizes.P - 1;
  } else if (wrong.id == kNumAccepted) {
    const HostTensor* slots = trial.inputs.input(kStateIndices);
    if (slots != nullptr && slots->get_int(at) < 0) return std::nullopt;
    const cases::TokenRange range = cases::sequences_of(trial.inputs)[static_cast<std::size_t>(at)];
    most = range.end - range.begin;
  }
  list.set(at, static_cast<double>(outside(random.bits(2), least, most, list.dtype)));
  return wrong;
}

}  // namespace kda::stress
