#include "stress/judge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "check.h"
#include "compare.h"
#include "stress/dye.h"
#include "stress/inputs.h"

namespace kda::stress {
namespace {

using cases::Case;
using cases::HostTensor;
using cases::TensorMap;
using enum TensorId;

/// Half of the last bit of the smallest fp16 numbers: what rounding to them may cost.
constexpr double kHalfStepOfF16 = 0x1p-25;
constexpr double kMostOfF16 = 65504;

constexpr double kLeastRms = 1e-8;  // of (7.1)
/// Below so many numbers a ratio is a draw; the limit then is 1 + kSpread / sqrt(count) times as
/// large. An RMS of n normal errors passes its expectation by that factor once in a million.
constexpr int64_t kFewNumbers = 1024;
constexpr double kSpread = 4;
constexpr uint64_t kFurtherDraws = 8;

/// The problem in float64, states updated in place included.
Problem exact_problem(const Draw& draw) {
  Problem problem = draw.problem;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role == Role::kOutput && problem.has(spec.id)) problem.set(spec.id, DType::kF64);
  }
  if (draw.state_in_place) problem.set(kInitialState, DType::kF64);
  return problem;
}

Result<TensorMap> expected_of(const Draw& draw, const Case& inputs) {
  TensorMap exact = inputs.inputs;
  if (draw.state_in_place) {
    exact[kInitialState] = cases::converted(exact.at(kInitialState), DType::kF64);
  }
  cases::Conditions conditions;
  conditions.options.implementation = "reference";
  conditions.state_in_place = draw.state_in_place;
  Result<cases::GuardedOutcome> outcome = run_guarded(exact_problem(draw), exact, conditions);
  if (!outcome.ok()) return outcome.status();
  return std::move(outcome->outputs);
}

/// The tensor of kCaseOutputs that has the shape and the limit.
TensorId row_of(TensorId id) {
  switch (id) {
    case kH:
      return kFinalState;
    case kDh:
      return kDinitialState;
    case kDqPartial:
      return kDq;
    case kDkPartial:
      return kDk;
    case kDgPartial:
      return kDg;
    case kDbetaPartial:
      return kDbeta;
    default:
      return id;
  }
}

DType coarser(DType a, DType b) {
  constexpr std::array kOrder = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  const auto rank = [&](DType dtype) { return std::find(kOrder.begin(), kOrder.end(), dtype); };
  return rank(a) < rank(b) ? b : a;
}

DType io_of(const Problem& problem) {
  return problem[tensors_of(problem.operation).front().id].dtype;
}

/// Implementations for tensor cores round operands to the dtype of the inputs, the others compute
/// in fp32 or fp64.
bool computes_in_halves(std::string_view family, const Problem& problem) {
  const bool portable = family == "reference" || family == "cpu" || family == "cuda";
  return !portable && size_of(io_of(problem)) == 2;
}

/// The dtype whose row of 7.3 an output is held to: its own or, if it is coarser, the one that the
/// implementation computes with.
DType held_to(const Problem& problem, std::string_view family, DType result) {
  if (!computes_in_halves(family, problem)) return result;
  return coarser(result, io_of(problem));
}

/// Saved tensors are results of a forward in their own dtype.
DType saved_dtype(const Problem& problem) {
  DType coarsest = DType::kF64;
  if (problem.operation != Operation::kChunkBackward) return coarsest;
  for (const TensorId id : {kH, kAqk, kA}) {
    if (problem.has(id)) coarsest = coarser(coarsest, problem[id].dtype);
  }
  return coarsest;
}

bool is_whole(Operation operation) {
  return operation == Operation::kChunkForward || operation == Operation::kChunkBackward;
}

bool fits_f16(const HostTensor& expected) {
  for (int64_t i = 0; i < expected.count(); ++i) {
    if (!(std::fabs(expected.get(i)) <= kMostOfF16)) return false;
  }
  return true;
}

double rms(const HostTensor& tensor) {
  double sum = 0;
  for (int64_t i = 0; i < tensor.count(); ++i) sum += tensor.get(i) * tensor.get(i);
  return tensor.count() == 0 ? 0 : std::sqrt(sum / static_cast<double>(tensor.count()));
}

/// RMS of each output of the reference over further draws of the inputs.
std::map<TensorId, double> usual_sizes(const Draw& draw) {
  std::map<TensorId, double> squares;
  for (uint64_t variant = 2; variant < 2 + kFurtherDraws; ++variant) {
    Result<Case> inputs = inputs_of(draw, variant);
    if (!inputs.ok()) return {};
    Result<TensorMap> outputs = expected_of(draw, *inputs);
    if (!outputs.ok()) return {};
    for (const auto& [id, tensor] : *outputs) {
      squares[id] += rms(tensor) * rms(tensor) / static_cast<double>(kFurtherDraws);
    }
  }
  for (auto& [_, size] : squares) size = std::sqrt(size);
  return squares;
}

class Examiner {
 public:
  Examiner(const Trial& trial, std::string_view family, const TensorMap& outputs)
      : trial_(trial),
        problem_(trial.draw.problem),
        sequences_(cases::sequences_of(trial.inputs)),
        family_(family),
        outputs_(outputs) {}

  std::vector<Fault> faults() {
    for (const auto& [id, expected] : trial_.expected) {
      compare(id, outputs_.at(id), expected);
      check_padding(id, outputs_.at(id));
    }
    check_idle_tokens();
    check_idle_states();
    return std::move(faults_);
  }

 private:
  void add(TensorId id, std::string text, double ratio = 0, double limit = 0) {
    faults_.push_back({std::string(name_of(id)), std::move(text), ratio, limit});
  }

  void compare(TensorId id, const HostTensor& result, const HostTensor& expected) {
    if (result.dtype == DType::kF16 && !fits_f16(expected)) return;
    cases::Difference d = cases::compare(trial_.inputs, row_of(id), result, expected);
    const DType row = coarser(held_to(problem_, family_, result.dtype), saved_dtype(problem_));
    double limit = limit_for(id, expected, row);
    if (!d.finite) {
      add(id, "not finite", d.ratio, limit);
      return;
    }
    if (row == DType::kF16) limit += kHalfStepOfF16 / (rms(expected) + kLeastRms);
    if (row == DType::kF64) {
      d.ratio = d.max_error;
      d.block_ratio = 0;
    }
    if (within(d, limit)) return;
    if (has_halves() && is_a_draw(id, expected)) {
      const double usual = (usual_rms(id) + kLeastRms) / (rms(expected) + kLeastRms);
      d.ratio /= std::max(1.0, usual);
      d.block_ratio /= std::max(1.0, usual);
      limit *= 1 + kSpread / std::sqrt(static_cast<double>(independent(id, expected)));
      if (within(d, limit)) return;
    }
    add(id,
        fmt::format("ratio {:.3g}, worst block {:.3g}, limit {:.3g}", d.ratio, d.block_ratio,
                    limit),
        d.ratio, limit);
  }

  static bool within(const cases::Difference& d, double limit) {
    return d.ratio <= limit && d.block_ratio <= cases::kBlockFactor * limit;
  }

  /// Whether operands or saved tensors have 16 bits.
  bool has_halves() const {
    return computes_in_halves(family_, problem_) || size_of(saved_dtype(problem_)) == 2;
  }

  /// Few numbers, or numbers that are sums of many terms of either sign: their size, the
  /// denominator of the ratio, is a draw, while the errors are as large as the terms make them.
  bool is_a_draw(TensorId id, const HostTensor& expected) const {
    return independent(id, expected) < kFewNumbers || id == kDALog || id == kDdtBias;
  }

  /// How many errors are apart from each other: those of one token and head are not, where the
  /// error of one score multiplies a whole row.
  int64_t independent(TensorId id, const HostTensor& expected) const {
    const bool rows = has_tokens(id) && expected.shape.size() == 4;
    return std::max<int64_t>(expected.count() / (rows ? expected.shape[3] : 1), 1);
  }

  /// Of the reference over further draws of the same inputs.
  double usual_rms(TensorId id) {
    if (usual_.empty()) usual_ = usual_sizes(trial_.draw);
    const auto found = usual_.find(id);
    return found == usual_.end() ? 0 : found->second;
  }

  /// Of the ratio. With 16-bit operands as `kda verify` holds ill-conditioned cases: what the model
  /// of rounding makes of the same inputs counts too. Intermediates of such cases (6.4) need only
  /// be finite.
  double limit_for(TensorId id, const HostTensor& expected, DType row) const {
    const double plain = cases::limit_of(cases::precision_of(row), row_of(id));
    if (!has_halves() || problem_.operation == Operation::kRecurrent) return plain;
    if (is_whole(problem_.operation)) {
      return cases::limit_beside(trial_.emulated, trial_.inputs, id, expected, row);
    }
    return trial_.inputs.ill_conditioned ? std::numeric_limits<double>::infinity() : plain;
  }

  bool has_tokens(TensorId id) const {
    for (const TensorSpec& spec : tensors_of(problem_.operation)) {
      if (spec.id == id) return spec.shape.starts_with("[B,T,");
    }
    return false;
  }

  /// The elements [begin, end) are zero, not merely small.
  void expect_zero(TensorId id, const HostTensor& tensor, int64_t begin, int64_t end,
                   std::string_view where) {
    for (int64_t i = begin; i < end; ++i) {
      if (tensor.get(i) == 0) continue;
      add(id, fmt::format("element {} is {} {}, expected 0", i, tensor.get(i), where));
      return;
    }
  }

  /// Rows that no sequence owns and chunk rows that no chunk uses.
  void check_padding(TensorId id, const HostTensor& tensor) {
    if (!problem_.packed()) return;
    if (has_tokens(id) && problem_.sizes.T > 0) {
      const int64_t row = tensor.count() / problem_.sizes.T;
      const int64_t end = sequences_.empty() ? 0 : sequences_.back().end;
      expect_zero(id, tensor, end * row, tensor.count(), "behind the last sequence");
    }
    if (id == kH || id == kDh) {
      int64_t used = 0;
      for (const cases::TokenRange& range : sequences_) {
        used += (range.end - range.begin + problem_.chunk_size - 1) / problem_.chunk_size;
      }
      const int64_t row = tensor.count() / std::max<int64_t>(tensor.shape[0], 1);
      expect_zero(id, tensor, used * row, tensor.count(), "behind the last chunk");
    }
  }

  bool skipped(std::size_t n) const {
    const HostTensor* slots = trial_.inputs.input(kStateIndices);
    return slots != nullptr && slots->get_int(static_cast<int64_t>(n)) < 0;
  }

  /// How many tokens of the sequence run.
  int64_t running(std::size_t n) const {
    if (skipped(n)) return 0;
    const HostTensor* counts = trial_.inputs.input(kNumAccepted);
    if (counts != nullptr) return counts->get_int(static_cast<int64_t>(n));
    return sequences_[n].end - sequences_[n].begin;
  }

  /// Skipped sequences and tokens that are not accepted give o = 0.
  void check_idle_tokens() {
    if (problem_.operation != Operation::kRecurrent || problem_.sizes.T == 0) return;
    const HostTensor& o = outputs_.at(kO);
    const int64_t row = problem_.sizes.HV * problem_.sizes.V;
    for (std::size_t n = 0; n < sequences_.size(); ++n) {
      const cases::TokenRange& range = sequences_[n];
      const int64_t first = range.batch * problem_.sizes.T;
      expect_zero(kO, o, (first + range.begin + running(n)) * row, (first + range.end) * row,
                  "at a token that does not run");
    }
  }

  /// States of sequences without a token, and slots of the pool that no sequence uses, keep every
  /// bit; in another dtype than the state had before they are rounded once.
  void check_idle_states() {
    for (const auto& [before, after] :
         {std::pair{kInitialState, kFinalState}, std::pair{kDfinalState, kDinitialState}}) {
      const auto found = outputs_.find(after);
      if (found == outputs_.end() || problem_.operation == Operation::kStateScan) continue;
      const HostTensor& states = found->second;
      std::vector<bool> idle(static_cast<std::size_t>(states.shape[0]),
                             problem_.has(kStateIndices));
      for (std::size_t n = 0; n < sequences_.size(); ++n) {
        if (!problem_.has(kStateIndices)) {
          idle[n] = running(n) == 0;
        } else if (!skipped(n)) {
          const int64_t slot = trial_.inputs.input(kStateIndices)->get_int(int64_t(n));
          idle[static_cast<std::size_t>(slot)] = running(n) == 0;
        }
      }
      expect_unchanged(after, states, trial_.inputs.input(before), idle);
    }
  }

  void expect_unchanged(TensorId id, const HostTensor& states, const HostTensor* before,
                        const std::vector<bool>& idle) {
    const int64_t size = states.count() / std::max<int64_t>(states.shape[0], 1);
    HostTensor rounded(states.dtype, states.shape);
    for (int64_t i = 0; before != nullptr && i < states.count(); ++i) {
      rounded.set(i, before->get(i));
    }
    for (int64_t i = 0; i < states.count(); ++i) {
      if (!idle[static_cast<std::size_t>(i / size)] || states.get(i) == rounded.get(i)) continue;
      add(id, fmt::format("element {} of a state that no token changes is {}, expected {}", i,
                          states.get(i), rounded.get(i)));
      return;
    }
  }

  const Trial& trial_;
  const Problem& problem_;
  std::vector<cases::TokenRange> sequences_;
  std::string_view family_;
  const TensorMap& outputs_;
  std::map<TensorId, double> usual_;
  std::vector<Fault> faults_;
};

/// Rows that need aligned addresses say so at the run, which alone knows them, and refuse where
/// they were chosen by name (docs/api.md).
bool is_about_alignment(const Status& status, const ImplementationInfo& implementation) {
  return status.code() == StatusCode::kInvalidArgument &&
         status.message().find(fmt::format("expected a multiple of 16 for {}",
                                           implementation.name)) != std::string::npos;
}

void add_failure(const Status& status, Judgement& judgement) {
  judgement.device_lost |= status.code() == StatusCode::kDeviceError;
  judgement.faults.push_back({"", status.message()});
}

/// The same run with one sequence spoilt.
void run_dyed(const Trial& trial, const cases::Conditions& plain, const TensorMap& outputs,
              Judgement& judgement) {
  cases::Conditions conditions = plain;
  conditions.repeat = false;
  conditions.numbers = false;
  conditions.copies = 1;
  Result<cases::GuardedOutcome> outcome =
      run_guarded(trial.draw.problem, dyed_inputs(trial), conditions);
  if (!outcome.ok()) {
    add_failure({outcome.status().code(), fmt::format("with NaN in sequence {}: {}",
                                                      trial.draw.dyed, outcome.status().message())},
                judgement);
    return;
  }
  const std::string trace = trace_of_dye(trial, outputs, outcome->outputs);
  if (!trace.empty()) judgement.faults.push_back({"", trace});
}

}  // namespace

Result<Trial> prepare(const Draw& draw, bool on_device) {
  Trial trial;
  trial.draw = draw;
  Result<Case> inputs = inputs_of(draw);
  if (!inputs.ok()) return inputs.status();
  trial.inputs = std::move(*inputs);
  if (on_device) {
    Result<Case> earlier = inputs_of(draw, 1);
    if (!earlier.ok()) return earlier.status();
    trial.earlier = std::move(earlier->inputs);
  }
  Result<TensorMap> expected = expected_of(draw, trial.inputs);
  if (!expected.ok()) return expected.status();
  trial.expected = std::move(*expected);
  const DType halves = coarser(io_of(draw.problem), saved_dtype(draw.problem));
  const bool needed = on_device || size_of(saved_dtype(draw.problem)) == 2;
  if (needed && is_whole(draw.problem.operation) && size_of(halves) == 2) {
    trial.emulated = cases::rounding_of(trial.inputs, halves);
  }
  return trial;
}

std::vector<Fault> faults_of(const Trial& trial, std::string_view family,
                             const TensorMap& outputs) {
  return Examiner(trial, family, outputs).faults();
}

Judgement judge(const Trial& trial, const ImplementationInfo& implementation, const Device& device,
                int threads) {
  cases::Conditions conditions;
  conditions.options.implementation = implementation.name;
  conditions.options.threads = threads > 0 ? threads : trial.draw.threads;
  conditions.repeat_threads = threads > 0 ? threads : trial.draw.repeat_threads;
  conditions.device = device;
  conditions.arrangement = trial.draw.arrangement;
  conditions.seed = trial.draw.spec.seed;
  conditions.state_in_place = trial.draw.state_in_place;
  conditions.repeat = true;
  conditions.copies = trial.draw.copies;
  if (!trial.earlier.empty()) conditions.earlier = &trial.earlier;
  Result<cases::GuardedOutcome> outcome =
      run_guarded(trial.draw.problem, trial.inputs.inputs, conditions);
  Judgement judgement;
  if (outcome.ok()) {
    judgement.ran = true;
    judgement.faults = faults_of(trial, implementation.family, outcome->outputs);
    if (trial.draw.dyed >= 0) run_dyed(trial, conditions, outcome->outputs, judgement);
    return judgement;
  }
  if (outcome.status().code() == StatusCode::kUnsupported ||
      is_about_alignment(outcome.status(), implementation)) {
    judgement.refusal = outcome.status().message();
  } else {
    judgement.ran = true;
    add_failure(outcome.status(), judgement);
  }
  return judgement;
}

}  // namespace kda::stress
