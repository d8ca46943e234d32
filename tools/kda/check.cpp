#include "check.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "chance.h"
#include "emulation.h"
#include "execute.h"

namespace kda::cases {
namespace {

/// fp32 has rounded the expected values by up to 2^-24 of each; 1.2e-7 leaves a factor of two.
constexpr double kRoundedExpectation = 1.2e-7;

constexpr std::string_view kReferencePrefix = "reference_";

Result<OutputTypes> output_types(const Case& c, const Device& device, const Options& options) {
  if (device.type != DeviceType::kCpu) return OutputTypes{};
  Result<Plan> plan = make_plan(forward_problem(c, {DType::kF32}), device, options);
  if (!plan.ok()) return plan.status();
  const bool is_reference = plan->implementation().rfind(kReferencePrefix, 0) == 0;
  return OutputTypes{is_reference ? DType::kF64 : DType::kF32};
}

Status complete_expected(const Case& c, const TensorMap& outputs, TensorMap& expected) {
  const bool complete = std::all_of(outputs.begin(), outputs.end(), [&](const auto& output) {
    return expected.count(output.first) != 0;
  });
  if (complete) return {};
  Result<TensorMap> reference = reference_outputs(c);
  if (!reference.ok()) return reference.status();
  expected.merge(*reference);
  return {};
}

bool passes(const CheckedOutput& checked) {
  const Difference& d = checked.difference;
  if (!d.finite) return false;
  if (checked.exact) return d.max_error <= checked.limit;
  return d.ratio <= checked.limit && d.block_ratio <= kBlockFactor * checked.limit;
}

/// RMS of an output of the reference over further draws of a case.
double usual_rms(const CaseSpec& spec, TensorId id) {
  double squares = 0;
  for (uint64_t i = 0; i < kFurtherDraws; ++i) {
    CaseSpec other = spec;
    other.seed = 1000 * (spec.seed + i);
    Result<TensorMap> outputs = reference_outputs(generate(other));
    const double size = outputs.ok() ? rms(outputs->at(id)) : 0;
    squares += size * size / static_cast<double>(kFurtherDraws);
  }
  return std::sqrt(squares);
}

TensorMap model_of(const Case& c, const Emulation& emulation) {
  TensorMap outputs = emulate(c, emulation);
  if (c.has_gradients()) outputs.merge(emulate_backward(c, emulation));
  return outputs;
}

}  // namespace

TensorMap emulated_rounding(const Case& c, DType io) {
  return c.ill_conditioned && size_of(io) == 2 ? rounding_of(c, io) : TensorMap{};
}

void look_again(const Case& c, const CaseSpec* spec, const HostTensor& result,
                const HostTensor& want, DType io, CheckedOutput& checked) {
  look_again_beside(rounding_of(c, io), c, spec, result, want, io, checked);
}

void look_again_beside(const TensorMap& emulated, const Case& c, const CaseSpec* spec,
                       const HostTensor& result, const HostTensor& want, DType io,
                       CheckedOutput& checked) {
  checked.difference = compare(c, checked.id, result, want, ShortBlocks::kPooled);
  checked.limit = limit_beside(emulated, c, checked.id, want, io);
  checked.pass = passes(checked);
  if (checked.pass || spec == nullptr) return;
  if (!checked.difference.finite || !is_a_draw(checked.id, want)) return;
  allow_for_chance(checked.id, want, usual_rms(*spec, checked.id), checked.difference,
                   checked.limit);
  checked.pass = passes(checked);
}

TensorMap rounding_of(const Case& c, DType io) {
  return model_of(c, {Emulation::Form::kWu, c.forward.chunk_size, io});
}

TensorMap score_errors_of(const Case& c) {
  Emulation model{Emulation::Form::kWu, c.forward.chunk_size, DType::kF64};
  // Each of K additions errs by 2^-25 sqrt(4/3) of a partial sum, which grows to the whole.
  model.score_error = 0x1p-26 * std::sqrt(static_cast<double>(c.forward.sizes.K));
  return model_of(c, model);
}

TensorMap gamma_errors_of(const Case& c) {
  Emulation model{Emulation::Form::kWu, c.forward.chunk_size, DType::kF64};
  model.fp32_gamma = true;
  return model_of(c, model);
}

double limit_beside(const TensorMap& emulated, const Case& c, TensorId id, const HostTensor& want,
                    DType io) {
  // Checkpoints are states.
  const TensorId as = id == TensorId::kH ? TensorId::kFinalState : id;
  const double limit = limit_of(precision_of(io), as);
  const auto found = emulated.find(id);
  if (found == emulated.end()) return limit;
  return std::max(limit, kRoundingFactor * compare(c, as, found->second, want).ratio);
}

Result<std::vector<CheckedOutput>> check_case(const Case& c, const Device& device,
                                              const Options& options, const CaseSpec* spec) {
  Result<OutputTypes> types = output_types(c, device, options);
  if (!types.ok()) return types.status();
  Result<Outcome> outcome = execute(c, {device, options, *types, true});
  if (!outcome.ok()) return outcome.status();
  TensorMap expected = c.expected;
  if (Status status = complete_expected(c, outcome->outputs, expected); !status.ok()) {
    return status;
  }
  const bool on_cpu = device.type == DeviceType::kCpu;
  const DType input = c.input(TensorId::kQ)->dtype;
  // The CPU computes in fp32 or fp64 whatever the inputs are.
  const TensorMap emulated = on_cpu ? TensorMap{} : emulated_rounding(c, input);
  std::vector<CheckedOutput> checked;
  for (const TensorId id : kCaseOutputs) {
    const auto found = outcome->outputs.find(id);
    if (found == outcome->outputs.end()) continue;
    const HostTensor& want = expected[id];
    CheckedOutput row;
    row.id = id;
    row.implementation = id == TensorId::kO || id == TensorId::kFinalState
                             ? outcome->forward_implementation
                             : outcome->backward_implementation;
    row.difference = compare(c, id, found->second, want);
    row.exact = found->second.dtype == DType::kF64;
    row.limit = row.exact && want.dtype != DType::kF64
                    ? kRoundedExpectation
                    : limit_beside(emulated, c, id, want, on_cpu ? found->second.dtype : input);
    row.pass = passes(row);
    if (!row.pass && spec != nullptr && !on_cpu && size_of(input) == 2) {
      look_again(c, spec, found->second, want, input, row);
    }
    checked.push_back(std::move(row));
  }
  return checked;
}

}  // namespace kda::cases
