#include "stress/draw.h"

#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

#include "random.h"

namespace kda::stress {
namespace {

using cases::Arrangement;
using cases::CaseSpec;
using cases::Family;
using enum TensorId;

/// Token x head x K x V products of a problem, of which making inputs, float64 reference and
/// comparing do some ten million a second. Few problems get the largest numbers, so that hundreds
/// fit a minute.
constexpr int64_t kSmallWork = 600'000;
constexpr int64_t kModelWork = 2'500'000;
constexpr int64_t kLongWork = 8'000'000;
constexpr int64_t kSegmentWork = 60'000'000;

constexpr std::array kFloats = {DType::kBF16, DType::kF16, DType::kF32};

bool is_stage(Operation operation) { return operation > Operation::kRecurrent; }

class Drawer {
 public:
  Drawer(uint64_t seed, int64_t number) : random_(seed, static_cast<uint64_t>(number)) {
    draw_.seed = seed;
    draw_.number = number;
  }

  Draw run() {
    draw_.spec.seed = bits();
    operation_ = some_operation();
    model_ = chance(40);
    choose_family();
    choose_types();
    choose_options();
    choose_sizes();
    draw_.problem = options_of(draw_.spec);
    draw_.problem.operation = operation_;
    if (is_stage(operation_) && operation_ != Operation::kGateCumsum) {
      draw_.problem.gate = Gate::kNone;
      draw_.problem.lower_bound = 0;
    }
    choose_inputs();
    choose_outputs();
    choose_conditions();
    return std::move(draw_);
  }

 private:
  uint64_t bits() { return random_.bits(next_++); }
  int64_t below(int64_t count) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(count));
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int64_t percent) { return below(100) < percent; }
  template <class Values>
  auto pick(const Values& values) {
    return *(std::begin(values) + below(static_cast<int64_t>(std::size(values))));
  }
  int64_t pick(std::initializer_list<int64_t> values) { return pick(std::vector(values)); }

  Operation some_operation() {
    const int64_t roll = below(100);
    if (roll < 28) return Operation::kChunkForward;
    if (roll < 58) return Operation::kChunkBackward;
    if (roll < 78) return Operation::kRecurrent;
    constexpr auto kFirst = static_cast<int64_t>(Operation::kGateCumsum);
    return static_cast<Operation>(kFirst + below(kOperationCount - kFirst));
  }

  void choose_family() {
    Family& family = draw_.spec.family;
    family = pick(cases::kFamilies);
    // Its outputs are silence without l2norm, which stages do not have.
    if (family == Family::kSmall && is_stage(operation_)) family = Family::kUnit;
  }

  void choose_types() {
    CaseSpec& spec = draw_.spec;
    if (model_) {
      spec.io = chance(75) ? DType::kBF16 : DType::kF16;
    } else {
      spec.io = chance(8) ? DType::kF64 : pick(kFloats);
    }
  }

  DType some_float() { return chance(3) ? DType::kF64 : pick(kFloats); }

  DType type_of(const TensorSpec& tensor) {
    const DType io = draw_.spec.io;
    const bool exact = io == DType::kF64;
    switch (tensor.dtypes) {
      case DTypeRule::kIo:
      case DTypeRule::kSameAsQ:
        return io;
      case DTypeRule::kFloatIo:
        return chance(model_ ? 92 : 65) ? io : some_float();
      case DTypeRule::kFloat:
        if (exact && chance(80)) return io;
        if (model_) return chance(65) ? DType::kF32 : io;
        return chance(50) ? DType::kF32 : some_float();
      case DTypeRule::kAccurate:
        return exact || chance(2) ? DType::kF64 : DType::kF32;
      case DTypeRule::kIndex:
        return draw_.spec.cu_dtype;
      case DTypeRule::kInt32:
        return DType::kI32;
    }
    return DType::kNone;
  }

  void choose_options() {
    CaseSpec& spec = draw_.spec;
    spec.gate = chance(40) ? Gate::kNone : chance(50) ? Gate::kSoftplus : Gate::kLowerBound;
    constexpr std::array kBounds = {-5.0, -5.0, -1.0, -0.1, -20.0};
    spec.lower_bound = pick(kBounds);
    spec.a_log = chance(70);
    spec.dt_bias = chance(60);
    spec.qk_l2norm = chance(60) || spec.family == Family::kSmall;
    spec.beta_sigmoid = chance(50);
    spec.allow_neg_eigval = spec.beta_sigmoid && chance(40);
    if (is_stage(operation_)) {
      spec.qk_l2norm = spec.beta_sigmoid = spec.allow_neg_eigval = false;
    }
    spec.state_v_first = chance(40);
    spec.initial_state = chance(70) || spec.family == Family::kPredicted;
    spec.dfinal_state = chance(60);
    spec.chunk_size = chance(model_ ? 20 : 35) ? 32 : 64;
    constexpr std::array kScales = {0.1, 1.0, -0.3, 3.0, 0.0};
    if (chance(25)) spec.scale = pick(kScales);
  }

  void choose_heads() {
    Sizes& s = draw_.spec.sizes;
    s.H = between(1, 3);
    s.HV = s.H * pick({1, 1, 1, 2, 3, 4});
    if (model_) {
      s.K = pick({64, 128, 128});
      s.V = pick({64, 128, 128, 192});
      return;
    }
    const auto ordinary = [&] { return chance(50) ? pick({8, 16, 32, 64}) : between(1, 40); };
    s.K = chance(75) ? ordinary() : pick({60, 100, 127, 128, 129, 192, 255, 256});
    s.V = chance(75) ? ordinary() : pick({65, 100, 128, 130, 192, 256, 257, 512});
  }

  /// The most tokens, over all batch rows.
  int64_t affordable_tokens() {
    Sizes& s = draw_.spec.sizes;
    int64_t work = model_ ? kModelWork : kSmallWork;
    if (chance(3)) {
      segments_ = model_ && operation_ != Operation::kRecurrent;
      work = segments_ ? kSegmentWork : kLongWork;
      if (segments_) {
        s.HV = s.H = 1;
        if (s.K == 128) s.V = 64;
      }
    }
    return std::max<int64_t>(1, work / (s.HV * s.K * s.V));
  }

  void choose_sizes() {
    choose_heads();
    Sizes& s = draw_.spec.sizes;
    const int64_t most = affordable_tokens();
    if (operation_ == Operation::kRecurrent && chance(70)) {
      s.T = std::min(most, pick({1, 1, 1, 2, 3, 4, 8, 19}));
      const int64_t rows = std::max<int64_t>(1, most / s.T);
      s.B = std::min(rows, chance(30) ? between(40, 160) : between(1, 24));
    } else {
      const int64_t roll = below(10);
      const int64_t wanted = roll < 3   ? pick({1, 2, 15, 16, 17, 31, 32, 33})
                             : roll < 7 ? pick({63, 64, 65, 96, 127, 128, 129, 150})
                                        : between(0, 300);
      s.T = std::min(most, segments_ ? 2500 + 1000 * roll + wanted : wanted);
      s.B = s.T == 0 ? between(1, 3) : between(1, std::clamp<int64_t>(most / s.T, 1, 3));
    }
    if (chance(3)) s.T = 0;
    if (chance(45)) pack();
  }

  /// Cuts of [0, T] with empty and one-token sequences and rows behind the last one.
  void pack() {
    CaseSpec& spec = draw_.spec;
    Sizes& s = spec.sizes;
    s.T = s.B * s.T + (chance(30) ? below(4) : 0);
    s.B = 1;
    std::vector<int64_t> cu{0};
    const int64_t cuts = chance(15) ? below(40) : below(6);
    for (int64_t i = 0; i < cuts; ++i) cu.push_back(below(s.T + 1));
    if (cu.size() > 1 && chance(40)) cu.push_back(std::min(s.T, cu.back() + 1));
    if (chance(60) || cu.size() == 1) cu.push_back(s.T);
    std::sort(cu.begin(), cu.end());
    spec.cu_seqlens = cu;
    spec.cu_dtype = chance(50) ? DType::kI32 : DType::kI64;
    spec.poison_tail = chance(60);
  }

  bool takes(const TensorSpec& tensor) {
    const CaseSpec& spec = draw_.spec;
    const bool has_gate = draw_.problem.gate != Gate::kNone;
    switch (tensor.id) {
      case kALog:
        return has_gate && (spec.a_log || spec.gate == Gate::kSoftplus);
      case kDtBias:
        return has_gate && spec.dt_bias;
      case kInitialState:
        return spec.initial_state;
      case kDfinalState:
        return spec.dfinal_state;
      case kCuSeqlens:
        return !spec.cu_seqlens.empty();
      case kStateIndices:
        return spec.initial_state && chance(40);
      case kNumAccepted:
        return spec.initial_state && chance(25);
      case kH:
      case kAqk:
      case kA:
        return tensor.required || chance(15);
      default:
        return tensor.required || chance(75);
    }
  }

  void choose_inputs() {
    for (const TensorSpec& tensor : tensors_of(operation_)) {
      if (tensor.role == Role::kInput && takes(tensor)) {
        draw_.problem.set(tensor.id, type_of(tensor));
      }
    }
    if (draw_.problem.has(kStateIndices)) {
      draw_.problem.sizes.P = std::max<int64_t>(1, draw_.problem.sequences() + below(4));
    }
  }

  /// Whether the inputs that it needs are there.
  bool possible(TensorId output) const {
    const Problem& p = draw_.problem;
    switch (output) {
      case kDALog:
        return p.has(kALog);
      case kDdtBias:
        return p.has(kDtBias);
      case kQg:
        return p.has(kQ);
      case kU:
        return p.has(kV);
      case kDqRaw:
        return p.has(kDo);
      default:
        return true;
    }
  }

  void choose_outputs() {
    Problem& p = draw_.problem;
    const bool all = chance(35);
    const TensorSpec* last = nullptr;
    bool any = false;
    for (const TensorSpec& tensor : tensors_of(operation_)) {
      if (tensor.role == Role::kInput || !possible(tensor.id)) continue;
      last = &tensor;
      // Tuned kernels do not save scores.
      const bool scores = model_ && !is_stage(operation_) && (tensor.id == kAqk || tensor.id == kA);
      if (!tensor.required && !(all && !scores) && !chance(scores ? 12 : 60)) continue;
      p.set(tensor.id, type_of(tensor));
      any = true;
    }
    if (!any) p.set(last->id, type_of(*last));
    if (p.has(kNumAccepted) && !p.has(kFinalState)) p.set(kFinalState, p[kInitialState].dtype);
    const bool shared = p.has(kStateIndices) || p.has(kNumAccepted);
    if (operation_ != Operation::kRecurrent && operation_ != Operation::kChunkForward) return;
    if (!p.has(kInitialState) || !p.has(kFinalState)) return;
    draw_.state_in_place = shared || chance(40);
    if (draw_.state_in_place) p.set(kFinalState, p[kInitialState].dtype);
  }

  void choose_conditions() {
    const int64_t roll = below(100);
    const int64_t plain = model_ ? 50 : 30;
    const int64_t aligned = model_ ? 85 : 45;
    draw_.arrangement = roll < plain     ? Arrangement::kContiguous
                        : roll < aligned ? Arrangement::kAligned
                        : roll % 4 == 0  ? Arrangement::kPadded
                        : roll % 4 == 1  ? Arrangement::kTransposed
                        : roll % 4 == 2  ? Arrangement::kShifted
                                         : Arrangement::kMixed;
    draw_.threads = static_cast<int32_t>(between(1, 4));
    draw_.repeat_threads = static_cast<int32_t>(between(1, 4));
    draw_.copies = static_cast<int>(between(1, 3));
    const int64_t sequences = draw_.problem.sequences();
    if (sequences > 1 && chance(30)) draw_.dyed = below(sequences);
    draw_.wrong_list = chance(25) && sequences > 0 &&
                       (draw_.problem.packed() || draw_.problem.has(kStateIndices) ||
                        draw_.problem.has(kNumAccepted));
    if (chance(12)) choose_repeats();
    // Last, so that older seeds keep their problems.
    if (chance(40)) draw_.repeat_workspace = 0.05 * static_cast<double>(between(2, 19));
  }

  /// One dimension of some inputs, but of no state that a run writes and of nothing that a forward
  /// made.
  void choose_repeats() {
    for (const TensorSpec& tensor : tensors_of(operation_)) {
      const bool floats = tensor.dtypes != DTypeRule::kIndex && tensor.dtypes != DTypeRule::kInt32;
      if (tensor.role == Role::kOutput || !draw_.problem.has(tensor.id) || !floats) continue;
      if (tensor.id == kInitialState && draw_.state_in_place) continue;
      if (!is_stage(operation_) && (tensor.id == kH || tensor.id == kAqk || tensor.id == kA)) {
        continue;
      }
      const auto rank = static_cast<int64_t>(draw_.problem.canonical_layout(tensor.id).rank);
      const auto dimension = static_cast<std::size_t>(below(rank));
      if (chance(40)) draw_.repeated.emplace_back(tensor.id, dimension);
    }
  }

  cases::Random random_;
  uint64_t next_ = 0;
  Draw draw_;
  Operation operation_ = Operation::kChunkForward;
  bool model_ = false;     ///< dtypes and sizes of models, which tuned kernels take
  bool segments_ = false;  ///< a long sequence of few heads, which these cut into segments
};

std::string_view name_of(Arrangement arrangement) {
  constexpr std::array<std::string_view, 6> kNames = {"contiguous", "padded",  "transposed",
                                                      "aligned",    "shifted", "mixed"};
  return kNames[static_cast<std::size_t>(arrangement)];
}

}  // namespace

Draw draw(uint64_t seed, int64_t number) { return Drawer(seed, number).run(); }

cases::Conditions conditions_of(const Draw& draw) {
  cases::Conditions conditions;
  conditions.options.threads = draw.threads;
  conditions.repeat_threads = draw.repeat_threads;
  conditions.repeat_workspace = draw.repeat_workspace;
  conditions.arrangement = draw.arrangement;
  conditions.seed = draw.spec.seed;
  conditions.state_in_place = draw.state_in_place;
  conditions.copies = draw.copies;
  conditions.repeated = draw.repeated;
  return conditions;
}

std::optional<Problem> with_fp32_outputs(const Draw& draw) {
  Problem problem = draw.problem;
  bool changed = false;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role != Role::kOutput || size_of(problem[spec.id].dtype) != 2) continue;
    if (spec.id == TensorId::kFinalState && draw.state_in_place) continue;
    problem.set(spec.id, DType::kF32);
    changed = true;
  }
  if (!changed) return std::nullopt;
  return problem;
}

std::string describe(const Draw& draw) {
  const Problem& p = draw.problem;
  std::string text = fmt::format("{} {}", kda::name_of(p.operation), cases::describe(draw.spec));
  if (p.scale) text += fmt::format(" scale={}", *p.scale);
  if (p.has(kStateIndices)) text += fmt::format(" pool of {}", p.sizes.P);
  if (draw.state_in_place) text += " in place";
  if (draw.dyed >= 0) text += fmt::format(" NaN in sequence {}", draw.dyed);
  if (draw.wrong_list) text += " wrong list";
  if (draw.repeat_workspace > 0) text += fmt::format(" workspace x {:.2f}", draw.repeat_workspace);
  for (const auto& [id, dimension] : draw.repeated) {
    text += fmt::format(" {}.stride({})=0", kda::name_of(id), dimension);
  }
  text += fmt::format("; {};", name_of(draw.arrangement));
  for (const TensorSpec& tensor : tensors_of(p.operation)) {
    if (!p.has(tensor.id)) continue;
    text += fmt::format(" {}:{}", kda::name_of(tensor.id), kda::name_of(p[tensor.id].dtype));
  }
  return text;
}

}  // namespace kda::stress
