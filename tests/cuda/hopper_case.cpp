#include "cuda/hopper_case.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "check.h"
#include "compare.h"
#include "cuda/device_case.h"
#include "execute.h"

namespace kda::test {

Conditions on_row(std::string_view row) {
  Conditions conditions;
  conditions.options = choosing(row);
  conditions.device = {DeviceType::kCuda, 0};
  conditions.repeat = true;
  return conditions;
}

std::string beyond(const Limit& limit, const Case& c, const TensorMap& results,
                   const TensorMap& expected) {
  std::string text;
  for (const auto& [id, reference] : expected) {
    // Blocks of h are one (chunk row, head), as those of states are.
    const TensorId as = id == TensorId::kH       ? TensorId::kFinalState
                        : id == TensorId::kDqRaw ? TensorId::kDq
                                                 : id;
    const Difference d = cases::compare(c, as, results.at(id), reference);
    const double most = limit(id, reference);
    if (d.finite && d.ratio <= most && d.block_ratio <= cases::kBlockFactor * most) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}{}; ", name_of(id),
                        d.ratio, d.block_ratio, most, d.finite ? "" : ", not finite");
  }
  return text;
}

Limit limits_beside_rounding(const Case& c, DType io) {
  return [&c, io, emulated = cases::emulated_rounding(c, io)](TensorId id,
                                                              const HostTensor& reference) {
    return cases::limit_beside(emulated, c, id, reference, io);
  };
}

CaseSpec spec_of(Sizes sizes, DType io, Family family) {
  CaseSpec spec;
  spec.sizes = sizes;
  spec.io = io;
  spec.family = family;
  return spec;
}

CaseSpec forward_spec(Sizes sizes, DType io, Family family) {
  CaseSpec spec = spec_of(sizes, io, family);
  spec.gradients = false;
  return spec;
}

Problem forward_with_states(const Case& c, bool exact) {
  Problem problem = forward_problem(c);
  const DType io = exact ? DType::kF64 : problem[kQ].dtype;
  problem.set(kO, io).set(kH, io);
  problem.set(kFinalState, exact ? DType::kF64 : DType::kF32);
  return problem;
}

std::string beyond_forward_limits(const Case& c, DType io, const TensorMap& results) {
  const TensorMap expected =
      cases::execute_operation(forward_with_states(c, true), c.inputs, {}, choosing("reference"))
          .value()
          .outputs;
  return beyond(limits_beside_rounding(c, io), c, results, expected);
}

void expect_right_forward(const CaseSpec& spec, bool in_place) {
  SCOPED_TRACE(cases::describe(spec));
  const Case c = cases::generate(spec);
  Conditions conditions = on_row("sm90_chunk_fwd");
  conditions.state_in_place = in_place;
  const auto outcome = run_guarded(forward_with_states(c, false), c.inputs, conditions);
  ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  EXPECT_EQ(outcome->implementation, "sm90_chunk_fwd");
  EXPECT_EQ(beyond_forward_limits(c, spec.io, outcome->outputs), "");
}

}  // namespace kda::test
