#include "generate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "blocks.h"
#include "random.h"

namespace kda::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr uint64_t kDirectionStream = 100;  // beside the streams that TensorId numbers
constexpr uint64_t kChoiceStream = 101;

bool is_ill_conditioned(Family family) {
  return family == Family::kCorr || family == Family::kSame || family == Family::kPredicted;
}

uint64_t stream_of(TensorId id) { return static_cast<uint64_t>(id); }

struct Normals {
  Random random;
  double operator()(int64_t i) const { return random.normal(static_cast<uint64_t>(i)); }
};

class Generator {
 public:
  explicit Generator(const CaseSpec& spec) : spec_(spec), s_(spec.sizes) {}

  Case run() {
    set_options();
    if (!spec_.cu_seqlens.empty()) add_cu_seqlens();
    add_parameters();
    add_queries_and_keys();
    add_gate();
    add_beta();
    if (spec_.initial_state || spec_.family == Family::kPredicted) {
      add(TensorId::kInitialState, DType::kF32, state_shape(), normals(TensorId::kInitialState));
    }
    add_values();
    if (spec_.gradients) {
      add(TensorId::kDo, spec_.io, {s_.B, s_.T, s_.HV, s_.V}, normals(TensorId::kDo));
      if (spec_.dfinal_state) {
        add(TensorId::kDfinalState, DType::kF32, state_shape(), normals(TensorId::kDfinalState));
      }
    }
    if (spec_.poison_tail) poison_tail();
    case_.forward = forward_problem(case_);
    return std::move(case_);
  }

 private:
  Random stream(TensorId id) const { return {spec_.seed, stream_of(id)}; }

  void set_options() {
    case_.name = describe(spec_);
    case_.ill_conditioned = is_ill_conditioned(spec_.family);
    case_.forward = options_of(spec_);
    s_.N = case_.forward.sizes.N;
  }

  std::vector<int64_t> state_shape() const {
    const int64_t states = spec_.cu_seqlens.empty() ? s_.B : s_.N;
    if (spec_.state_v_first) return {states, s_.HV, s_.V, s_.K};
    return {states, s_.HV, s_.K, s_.V};
  }

  template <class Value>
  void add(TensorId id, DType dtype, std::vector<int64_t> shape, const Value& value) {
    HostTensor tensor(dtype, std::move(shape));
    in_blocks(tensor.count(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) tensor.set(i, value(i));
    });
    case_.inputs[id] = std::move(tensor);
  }

  Normals normals(TensorId id) const { return {stream(id)}; }

  void add_cu_seqlens() {
    add(TensorId::kCuSeqlens, spec_.cu_dtype, {s_.N + 1}, [&](int64_t i) {
      return static_cast<double>(spec_.cu_seqlens[static_cast<std::size_t>(i)]);
    });
  }

  void add_parameters() {
    if (spec_.gate == Gate::kNone) return;
    if (spec_.a_log || spec_.gate == Gate::kSoftplus) {
      add(TensorId::kALog, spec_.parameter_dtype, {s_.HV}, [&](int64_t i) {
        return stream(TensorId::kALog).uniform(static_cast<uint64_t>(i), -0.5, 1.0);
      });
    }
    if (spec_.dt_bias) {
      add(TensorId::kDtBias, spec_.parameter_dtype, {s_.HV * s_.K}, [&](int64_t i) {
        return 0.5 * stream(TensorId::kDtBias).normal(static_cast<uint64_t>(i));
      });
    }
  }

  void add_queries_and_keys() {
    add_rows(TensorId::kQ);
    add_rows(TensorId::kK);
  }

  void add_rows(TensorId id) {
    HostTensor tensor(spec_.io, {s_.B, s_.T, s_.H, s_.K});
    in_blocks(s_.B * s_.T * s_.H, s_.K, [&](int64_t begin, int64_t end) {
      std::vector<double> row(static_cast<std::size_t>(s_.K));
      for (int64_t r = begin; r < end; ++r) {
        fill_row(id, r, row);
        for (int64_t i = 0; i < s_.K; ++i) {
          tensor.set(r * s_.K + i, row[static_cast<std::size_t>(i)]);
        }
      }
    });
    case_.inputs[id] = std::move(tensor);
  }

  static void normalise(std::vector<double>& row, double length) {
    double squares = 0;
    for (const double x : row) squares += x * x;
    const double factor = squares > 0 ? length / std::sqrt(squares) : 0;
    for (double& x : row) x *= factor;
  }

  void fill_row(TensorId id, int64_t r, std::vector<double>& row) const {
    const int64_t head = r % s_.H;
    const int64_t t = r / s_.H % s_.T;
    const bool is_key = id == TensorId::kK;
    const bool aligned = is_key && (spec_.family == Family::kCorr || spec_.family == Family::kSame);
    const Random noise = stream(id);
    const Random direction(spec_.seed, kDirectionStream);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const uint64_t own = static_cast<uint64_t>(r) * row.size() + i;
      const uint64_t shared = static_cast<uint64_t>(head) * row.size() + i;
      row[i] = aligned ? direction.normal(shared) : noise.normal(own);
      if (aligned && spec_.family == Family::kCorr) row[i] += 0.05 * noise.normal(own);
    }
    const bool is_zero = spec_.family == Family::kZero && t % (is_key ? 5 : 7) == 3;
    if (is_zero) {
      std::fill(row.begin(), row.end(), 0.0);
    } else if (spec_.family == Family::kSmall) {
      for (double& x : row) x *= 1e-4;
    } else if (!spec_.qk_l2norm) {
      normalise(row, aligned && spec_.family == Family::kCorr ? 0.9 : 1.0);
    }
  }

  /// The natural-log decay that element (row = (b, t), hv, k) should have.
  double decay(int64_t row, int64_t hv, int64_t k) const {
    const auto index = static_cast<uint64_t>((row * s_.HV + hv) * s_.K + k);
    const Random random = stream(TensorId::kG);
    const Random choice(spec_.seed, kChoiceStream);
    switch (spec_.family) {
      case Family::kCorr:
        return random.uniform(index, -0.0341, -0.0121);
      case Family::kNoDecay:
        return 0;
      case Family::kSlow:
      case Family::kPredicted:
        return -1e-4;
      case Family::kBound:
        return -5;
      case Family::kMix:
        return k % 2 == 0 ? -5 : 0;
      case Family::kDeep: {
        constexpr double kDepths[] = {-28, -500, -kInfinity};
        if (choice.uniform(index) < 0.1) return kDepths[choice.bits(index) % 3];
        break;
      }
      case Family::kReset:
        if (row % s_.T % 48 == 21) return -kInfinity;
        break;
      default:
        break;
    }
    return -random.uniform(index);
  }

  /// The z = g_raw + dt_bias for which the gate gives `g`: the inverse of (3.4) and (3.8).
  double gate_input(double g, double a) const {
    constexpr double kFar = 50;  // sigmoid and softplus are at their ends there
    if (spec_.gate == Gate::kSoftplus) {
      const double target = std::min(-g / a, 1000.0);
      return target > 30 ? target : target > 0 ? std::log(std::expm1(target)) : -kFar;
    }
    const double share = g / spec_.lower_bound;
    if (share <= 0) return -kFar / a;
    if (share >= 1) return kFar / a;
    return std::log(share / (1 - share)) / a;
  }

  void add_gate() {
    const HostTensor* A_log = case_.input(TensorId::kALog);
    const HostTensor* bias = case_.input(TensorId::kDtBias);
    add(TensorId::kG, spec_.gate_dtype, {s_.B, s_.T, s_.HV, s_.K}, [&](int64_t i) {
      const int64_t k = i % s_.K;
      const int64_t hv = i / s_.K % s_.HV;
      const double g = decay(i / s_.K / s_.HV, hv, k);
      if (spec_.gate == Gate::kNone) return g;
      const double a = A_log == nullptr ? 1 : std::exp(A_log->get(hv));
      return gate_input(g, a) - (bias == nullptr ? 0 : bias->get(hv * s_.K + k));
    });
  }

  void add_beta() {
    const Random random = stream(TensorId::kBeta);
    add(TensorId::kBeta, spec_.gate_dtype, {s_.B, s_.T, s_.HV}, [&](int64_t i) {
      const auto index = static_cast<uint64_t>(i);
      if (spec_.beta_sigmoid) return 1.5 * random.normal(index);
      return spec_.family == Family::kCorr ? 1.0 : random.uniform(index);
    });
  }

  void add_values() {
    const std::vector<int64_t> shape{s_.B, s_.T, s_.HV, s_.V};
    add(TensorId::kV, spec_.io, shape, normals(TensorId::kV));
    if (spec_.family != Family::kPredicted) return;
    const std::vector<TokenRange> sequences = sequences_of(case_);
    for (std::size_t n = 0; n < sequences.size(); ++n) {
      for (int64_t hv = 0; hv < s_.HV; ++hv) {
        predict(sequences[n], static_cast<int64_t>(n), hv);
      }
    }
  }

  /// v_t = (initial_state decayed to t)^T k_t and a little more. Without that rest the error e_t,
  /// and dbeta with it, would be rounding alone: nothing to compare with.
  void predict(const TokenRange& range, int64_t n, int64_t hv) {
    const HostTensor& state = case_.inputs[TensorId::kInitialState];
    const HostTensor& keys = case_.inputs[TensorId::kK];
    HostTensor& values = case_.inputs[TensorId::kV];
    const auto noise = normals(TensorId::kV);
    std::vector<double> key(static_cast<std::size_t>(s_.K));
    for (int64_t t = range.begin; t < range.end; ++t) {
      const int64_t row = range.batch * s_.T + t;
      const int64_t head = hv / (s_.HV / s_.H);
      for (int64_t k = 0; k < s_.K; ++k) {
        key[static_cast<std::size_t>(k)] = keys.get((row * s_.H + head) * s_.K + k);
      }
      if (spec_.qk_l2norm) normalise(key, 1);
      const double decayed = std::exp(-1e-4 * static_cast<double>(t - range.begin + 1));
      for (int64_t v = 0; v < s_.V; ++v) {
        double sum = 0;
        for (int64_t k = 0; k < s_.K; ++k) {
          const int64_t inner = spec_.state_v_first ? v * s_.K + k : k * s_.V + v;
          sum +=
              state.get((n * s_.HV + hv) * s_.K * s_.V + inner) * key[static_cast<std::size_t>(k)];
        }
        const int64_t index = (row * s_.HV + hv) * s_.V + v;
        values.set(index, decayed * sum + 0.05 * noise(index));
      }
    }
  }

  void poison_tail() {
    if (spec_.cu_seqlens.empty()) return;
    for (auto& [id, tensor] : case_.inputs) {
      const bool has_tokens = id == TensorId::kQ || id == TensorId::kK || id == TensorId::kV ||
                              id == TensorId::kG || id == TensorId::kBeta || id == TensorId::kDo;
      if (!has_tokens) continue;
      const int64_t row = tensor.count() / std::max<int64_t>(s_.T, 1);
      for (int64_t i = spec_.cu_seqlens.back() * row; i < tensor.count(); ++i) {
        tensor.set(i, std::numeric_limits<double>::quiet_NaN());
      }
    }
  }

  const CaseSpec& spec_;
  Sizes s_;
  Case case_;
};

}  // namespace

std::string_view name_of(Family family) {
  constexpr std::array<std::string_view, kFamilies.size()> kNames = {
      "unit", "corr", "same",  "nodecay", "slow", "bound",
      "mix",  "deep", "reset", "small",   "zero", "predicted"};
  return kNames[static_cast<std::size_t>(family)];
}

std::string describe(const CaseSpec& spec) {
  const Sizes& s = spec.sizes;
  std::string text = fmt::format("{} B{} T{} H{} HV{} K{} V{} {}", name_of(spec.family), s.B, s.T,
                                 s.H, s.HV, s.K, s.V, name_of(spec.io));
  const auto note = [&text](bool condition, std::string_view word) {
    if (condition) text += fmt::format(" {}", word);
  };
  note(spec.gate != Gate::kNone, name_of(spec.gate));
  note(spec.gate == Gate::kLowerBound && !spec.a_log, "no-A_log");
  note(spec.gate_dtype != DType::kF32, fmt::format("g-{}", name_of(spec.gate_dtype)));
  note(spec.qk_l2norm, "l2norm");
  note(spec.beta_sigmoid, "beta-sigmoid");
  note(spec.allow_neg_eigval, "neg-eigval");
  note(spec.state_v_first, "v-first");
  note(!spec.initial_state, "no-h0");
  note(spec.chunk_size != 64, fmt::format("C{}", spec.chunk_size));
  note(!spec.cu_seqlens.empty(), fmt::format("cu={}", fmt::join(spec.cu_seqlens, ",")));
  return text + fmt::format(" seed {}", spec.seed);
}

Problem options_of(const CaseSpec& spec) {
  Problem p;
  p.sizes = spec.sizes;
  if (!spec.cu_seqlens.empty()) p.sizes.N = static_cast<int64_t>(spec.cu_seqlens.size()) - 1;
  p.scale = spec.scale;
  p.gate = spec.gate;
  p.lower_bound = spec.gate == Gate::kLowerBound ? spec.lower_bound : 0;
  p.qk_l2norm = spec.qk_l2norm;
  p.beta_sigmoid = spec.beta_sigmoid;
  p.allow_neg_eigval = spec.allow_neg_eigval;
  p.state_v_first = spec.state_v_first;
  p.chunk_size = spec.chunk_size;
  return p;
}

Case generate(const CaseSpec& spec) { return Generator(spec).run(); }

}  // namespace kda::cases
