#include "property/judging.h"

#include <string>
#include <vector>

#include <fmt/format.h>

#include "check.h"
#include "support/calls.h"

namespace kda::test {

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

void Judged::expect_right(const Case& c, const std::string& what, const CaseSpec* spec) const {
  const TensorMap expected = cases::reference_outputs(c).value();
  expect_right(c, OutputTypes{}, expected, what, spec);
  if (is_hopper()) return;
  expect_right(c, OutputTypes{DType::kF32}, expected, what + " with fp32 results");
}

void Judged::expect_right(const Case& c, OutputTypes types, const TensorMap& expected,
                          const std::string& what, const CaseSpec* spec) const {
  std::vector<Problem> problems{forward_problem(c, types)};
  if (c.has_gradients()) problems.push_back(backward_problem(c, types));
  for (const Problem& problem : problems) {
    attempt([&] {
      const TensorMap results = results_of(problem, c.inputs);
      EXPECT_EQ(beyond(c, results, part_for(problem, expected), spec), "") << what;
    });
  }
}

std::string Judged::beyond(const Case& c, const TensorMap& results, const TensorMap& expected,
                           const CaseSpec* spec) const {
  if (!is_hopper()) {
    const std::string text = beyond_limits(c, results, expected);
    const bool in_fp32 = !on_cpu() && c.inputs.at(TensorId::kQ).dtype != DType::kF64;
    return text.empty() || !in_fp32 ? text : beyond_gamma(c, results, expected);
  }
  const DType io = c.inputs.at(TensorId::kQ).dtype;
  std::string text;
  for (const auto& [id, want] : expected) {
    const HostTensor& result = results.at(id);
    const double limit = cases::limit_of(cases::precision_of(io), id);
    if (within(cases::compare(c, id, result, want), limit)) continue;
    cases::CheckedOutput checked;
    checked.id = id;
    cases::look_again(c, spec, result, want, io, checked);
    const Difference& d = checked.difference;
    if (checked.pass) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}{}; ", name_of(id),
                        d.ratio, d.block_ratio, checked.limit, d.finite ? "" : ", not finite");
  }
  return text;
}

std::string Judged::beyond_gamma(const Case& c, const TensorMap& results,
                                 const TensorMap& expected) const {
  const TensorMap model = cases::gamma_errors_of(c);
  std::string text;
  for (const auto& [id, want] : expected) {
    const HostTensor& result = results.at(id);
    const Difference d = cases::compare(c, id, result, want);
    const double limit = cases::limit_beside(model, c, id, want, result.dtype);
    if (within(d, limit)) continue;
    text += fmt::format(
        "{}: ratio {:.3g}, worst block {:.3g}, limit beside the rounding of gamma {:.3g}{}; ",
        name_of(id), d.ratio, d.block_ratio, limit, d.finite ? "" : ", not finite");
  }
  if (text.empty()) {
    note_limit(family(), "decays from sums of deep gates in fp32, which err by 2^-25 of the sum");
  }
  return text;
}

double Judged::limit(double for_fp32, TensorId id) const {
  return is_hopper() ? cases::limit_of(cases::Precision::kBF16, id) : for_fp32;
}

}  // namespace kda::test
