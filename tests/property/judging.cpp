#include "property/judging.h"

#include <string>
#include <vector>

#include <fmt/format.h>

#include "check.h"

namespace kda::test {

using cases::Case;
using cases::Difference;
using cases::HostTensor;
using cases::OutputTypes;
using cases::ShortBlocks;
using cases::TensorMap;

namespace {

bool within(const Difference& d, double limit) {
  return d.finite && d.ratio <= limit && d.block_ratio <= cases::kBlockFactor * limit;
}

/// Of the expected outputs those that the problem has.
TensorMap part_for(const Problem& problem, const TensorMap& expected) {
  TensorMap part;
  for (const auto& [id, tensor] : expected) {
    if (problem.has(id)) part[id] = tensor;
  }
  return part;
}

}  // namespace

void Judged::expect_right(const Case& c, const std::string& what) const {
  const TensorMap expected = cases::reference_outputs(c).value();
  expect_right(c, OutputTypes{}, expected, what);
  if (is_hopper()) return;
  expect_right(c, OutputTypes{DType::kF32}, expected, what + " with fp32 results");
}

void Judged::expect_right(const Case& c, OutputTypes types, const TensorMap& expected,
                          const std::string& what) const {
  std::vector<Problem> problems{forward_problem(c, types)};
  if (c.has_gradients()) problems.push_back(backward_problem(c, types));
  for (const Problem& problem : problems) {
    attempt([&] {
      EXPECT_EQ(beyond(c, results_of(problem, c.inputs), part_for(problem, expected)), "") << what;
    });
  }
}

std::string Judged::beyond(const Case& c, const TensorMap& results,
                           const TensorMap& expected) const {
  if (!is_hopper()) return beyond_limits(c, results, expected);
  const DType io = c.inputs.at(TensorId::kQ).dtype;
  TensorMap rounded;
  std::string text;
  for (const auto& [id, want] : expected) {
    const HostTensor& result = results.at(id);
    if (within(cases::compare(c, id, result, want), cases::limit_of(cases::precision_of(io), id))) {
      continue;
    }
    if (rounded.empty() && size_of(io) == 2) rounded = cases::rounding_of(c, io);
    const double most = cases::limit_beside(rounded, c, id, want, io);
    const Difference d = cases::compare(c, id, result, want, ShortBlocks::kPooled);
    if (within(d, most)) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}{}; ", name_of(id),
                        d.ratio, d.block_ratio, most, d.finite ? "" : ", not finite");
  }
  return text;
}

double Judged::limit(double for_fp32, TensorId id) const {
  return is_hopper() ? cases::limit_of(cases::Precision::kBF16, id) : for_fp32;
}

}  // namespace kda::test
