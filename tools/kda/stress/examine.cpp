// What is wrong with given outputs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "chance.h"
#include "check.h"
#include "compare.h"
#include "execute.h"
#include "stress/inputs.h"
#include "stress/judge.h"

namespace kda::stress {
namespace {

using cases::Case;
using cases::HostTensor;
using cases::TensorMap;
using enum TensorId;

/// Half of the last bit of the smallest fp16 numbers: what rounding to them may cost.
constexpr double kHalfStepOfF16 = 0x1p-25;
constexpr double kMostOfF16 = 65504;

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

bool fits_f16(const HostTensor& expected) {
  for (int64_t i = 0; i < expected.count(); ++i) {
    if (!(std::fabs(expected.get(i)) <= kMostOfF16)) return false;
  }
  return true;
}

/// RMS of each output of the reference over further draws of the inputs.
std::map<TensorId, double> usual_sizes(const Draw& draw) {
  std::map<TensorId, double> squares;
  for (uint64_t variant = 2; variant < 2 + cases::kFurtherDraws; ++variant) {
    Result<Case> inputs = inputs_of(draw, variant);
    if (!inputs.ok()) return {};
    Result<TensorMap> outputs = expected_of(draw, *inputs);
    if (!outputs.ok()) return {};
    for (const auto& [id, tensor] : *outputs) {
      squares[id] +=
          cases::rms(tensor) * cases::rms(tensor) / static_cast<double>(cases::kFurtherDraws);
    }
  }
  for (auto& [_, size] : squares) size = std::sqrt(size);
  return squares;
}

/// The largest size of gamma that the gates of a problem make; 0 for one without.
double deepest_gamma(const Trial& trial) {
  const Problem& whole = trial.draw.problem;
  const HostTensor* gamma = trial.inputs.input(kGamma);
  cases::OperationOutcome outcome;
  if (gamma == nullptr) {
    Problem problem = whole;
    problem.operation = Operation::kGateCumsum;
    problem.tensors = {};
    problem.qk_l2norm = problem.beta_sigmoid = problem.allow_neg_eigval = false;
    for (const TensorId id : {kG, kALog, kDtBias, kCuSeqlens}) problem.set(id, whole[id].dtype);
    problem.set(kGamma, DType::kF64);
    Options reference;
    reference.implementation = "reference";
    Result<cases::OperationOutcome> made =
        cases::execute_operation(problem, trial.inputs.inputs, {}, reference);
    if (!made.ok()) return 0;
    outcome = std::move(*made);
    gamma = &outcome.outputs.at(kGamma);
  }
  double deepest = 0;
  for (int64_t i = 0; i < gamma->count(); ++i) {
    deepest = std::max(deepest, std::fabs(gamma->get(i)));
  }
  return deepest;
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
    cases::Difference d =
        cases::compare(trial_.inputs, row_of(id), result, expected, cases::ShortBlocks::kPooled);
    const DType row = coarser(held_to(problem_, family_, result.dtype), saved_dtype(problem_));
    double limit = limit_for(id, expected, row);
    if (!d.finite) {
      add(id, "not finite", d.ratio, limit);
      return;
    }
    if (row == DType::kF16) limit += kHalfStepOfF16 / (cases::rms(expected) + cases::kLeastRms);
    if (row == DType::kF64) {
      d.ratio = d.max_error;
      d.block_ratio = 0;
    }
    if (within(d, limit)) return;
    if (d.ratio <= limit && d.block_ratio <= model_block(id, expected)) return;
    if (row == DType::kF32) {
      limit += decay_rounding();
      relate_to_start(id, expected, d);
      if (within(d, limit)) return;
      limit = std::max(limit, error_of_scores(id, expected));
      if (within(d, limit)) return;
    }
    relate_to_rows(id, expected, d);
    if (within(d, limit)) return;
    double size = cases::rms(expected);  // the denominator of the ratio
    if (row != DType::kF64 && cases::is_a_draw(id, expected)) {
      cases::allow_for_chance(id, expected, usual_rms(id), d, limit);
      if (within(d, limit)) return;
      size = std::max(size, usual_rms(id));
    }
    if (row != DType::kF64 && id == kDg && problem_.operation == Operation::kChunkBackward) {
      limit += cancellation_in_dg() / (size + cases::kLeastRms);
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

  /// A state is the one that it starts from and what tokens add, which may all but erase it: errors
  /// are as large as the largest of these.
  void relate_to_start(TensorId id, const HostTensor& expected, cases::Difference& d) const {
    const bool behind = id == kDinitialState || id == kDh;
    if (!behind && id != kFinalState && id != kH) return;
    const HostTensor* start = trial_.inputs.input(behind ? kDfinalState : kInitialState);
    const double size = cases::rms(expected) + cases::kLeastRms;
    if (start == nullptr || cases::rms(*start) <= size) return;
    d.ratio *= size / cases::rms(*start);
    d.block_ratio *= size / cases::rms(*start);
  }

  /// Behind a norm only what is orthogonal to a row is left of its gradient, which is next to
  /// nothing where all channels of q, or of k, are alike: errors are as large as before.
  void relate_to_rows(TensorId id, const HostTensor& expected, cases::Difference& d) const {
    const bool behind_norm = problem_.operation == Operation::kChunkBackward &&
                             problem_.qk_l2norm && (id == kDq || id == kDk);
    if (!behind_norm) return;
    const double before = cases::rms(gradient_before_norm(trial_, id).value());
    const double size = cases::rms(expected) + cases::kLeastRms;
    if (before <= size) return;
    d.ratio *= size / before;
    d.block_ratio *= size / before;
  }

  /// Relative, of a decay between two tokens in fp32: each is the difference of two sums gamma,
  /// that are rounded to 2^-24 of their size. Below 4e-6 for ordinary gates.
  double decay_rounding() {
    if (!deepest_) deepest_ = deepest_gamma(trial_);
    return std::numbers::ln2 * 0x1p-24 * *deepest_;
  }

  /// Relative, from sums k . k in fp32: A takes their errors to A dL A, which is large where keys
  /// repeat and beta is near 2.
  double error_of_scores(TensorId id, const HostTensor& expected) {
    if (!is_whole(problem_.operation)) return 0;
    if (scores_.empty()) scores_ = cases::score_errors_of(trial_.inputs);
    const auto found = scores_.find(id);
    if (found == scores_.end()) return 0;
    cases::Difference d = cases::compare(trial_.inputs, row_of(id), found->second, expected);
    relate_to_start(id, expected, d);
    return cases::kRoundingFactor * d.ratio;
  }

  /// Absolute: the last bit in fp32 of the largest term that dg is a difference of, once for each
  /// addition over a chunk, in either direction at random.
  double cancellation_in_dg() {
    if (!largest_term_) largest_term_ = largest_term_of_dg(trial_).value();
    return std::sqrt(problem_.chunk_size) * 0x1p-24 * *largest_term_;
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

  /// What the worst block may have because the model of rounding has it; 0 without one.
  double model_block(TensorId id, const HostTensor& expected) const {
    const auto found = trial_.emulated.find(id);
    if (!has_halves() || !is_whole(problem_.operation) || found == trial_.emulated.end()) return 0;
    return cases::kRoundingFactor *
           cases::compare(trial_.inputs, row_of(id), found->second, expected).block_ratio;
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
  TensorMap scores_;  ///< cases::score_errors_of, when it was asked for
  std::optional<double> deepest_;
  std::optional<double> largest_term_;
  std::vector<Fault> faults_;
};

}  // namespace

std::vector<Fault> faults_of(const Trial& trial, std::string_view family,
                             const TensorMap& outputs) {
  return Examiner(trial, family, outputs).faults();
}

}  // namespace kda::stress
