// Fault reports on numbers: NaN, infinity, lost precision. Each name carries its id.
#include <algorithm>
#include <cmath>
#include <map>

#include "property/reports.h"
#include "support/calls.h"

namespace kda::test {
namespace {

constexpr double kLn2 = 0.6931471805599453;

// Keys that point the same way, beta = 1, slow decay: the triangular system at its worst.
TEST_P(Reports, NUM_01_CorrelatedKeys) {
  for (const DType io : {DType::kBF16, DType::kF32}) {
    for (const int64_t T : {1024, 8192}) {
      // Hopper rows are beyond 7.3 here, and the model beside which they are held takes a minute.
      if (is_hopper() && T > 1024) continue;
      CaseSpec spec = small_spec(T);
      if (T > 1024) spec.sizes.K = spec.sizes.V = 16;
      spec.family = Family::kCorr;
      spec.io = io;
      spec.initial_state = false;
      spec.cu_seqlens = {0, T};
      expect_right(make(spec), "T " + std::to_string(T));
    }
  }
}

// Constant decays whose span over 16 rows passes 126 and 127 powers of two.
TEST_P(Reports, NUM_03_StrongDecayIsForgottenNotReadBack) {
  for (const double d : {4.0, 8.4, 8.5, 9.0, 12.0, 40.0}) {
    Case c = make(small_spec(130));
    set_input(c, kG, [&](int64_t) { return -d * kLn2; });
    expect_right(c, "log2 decay " + std::to_string(d));
  }
}

TEST_P(Reports, NUM_05_SoftplusGateOfPublishedModels) {
  for (const double size : {1.0, 4.0}) {
    // dA_log of a Hopper row and of few heads is a draw, and this input none that a spec repeats
    // (7.3): there are more heads.
    const int64_t heads = is_hopper() ? 16 : 2;
    CaseSpec spec = small_spec(is_hopper() ? 200 : 1024);
    spec.sizes.HV = heads;
    spec.gate = Gate::kSoftplus;
    Case c = make(spec);
    set_input(c, kALog, [](int64_t i) { return std::log(uniform(i, 1, 16)); });
    set_input(c, kDtBias, [](int64_t i) { return std::log(std::expm1(uniform(i, 1e-3, 0.1))); });
    set_input(c, kG, [&](int64_t i) {
      const int64_t token = i / (heads * 64);
      return token % 16 == 5 && i % 64 == 3 ? 30 : size * uniform(i, -1.7, 1.7);
    });
    expect_right(c, "raw gates of size " + std::to_string(size));
  }
}

// Nothing bounds errors without decay: each output's may grow with the square root of T at most.
TEST_P(Reports, NUM_06_NoDecayStaysStable) {
  for (const bool every_token : {true, false}) {
    for (const double beta : {1.0, 1 - 0x1p-20}) {
      std::map<TensorId, double> at_64_tokens;
      for (const int64_t T : {64, 1024, 16384}) {
        // The model that Hopper rows may be held beside takes seconds for 16384 tokens.
        if (is_hopper() && T > 1024 && !(every_token && beta == 1)) continue;
        CaseSpec spec = small_spec(T);
        spec.sizes.K = spec.sizes.V = 16;
        spec.io = DType::kBF16;
        Case c = make(spec);
        set_input(c, kBeta, [&](int64_t) { return beta; });
        set_input(c, kG, [&](int64_t i) {
          return every_token || i / c.forward.sizes.K % 2 == 1 ? 0.0 : -1.0;
        });
        const TensorMap expected = cases::reference_outputs(c).value();
        if (!is_hopper()) expect_right(c, OutputTypes{}, expected, "T " + std::to_string(T));
        attempt([&] {
          // In fp32, where the family writes it, the rounding of results hides nothing.
          const OutputTypes types = is_hopper() ? OutputTypes{} : OutputTypes{DType::kF32};
          const TensorMap results = results_of(c, types);
          EXPECT_EQ(beyond(c, results, expected), "") << "T " << T;
          for (const auto& [id, result] : results) {
            // The operands of Hopper rows are rounded: gradients of 64 tokens are a small sample.
            if (is_hopper() && id != kO && id != kFinalState) continue;
            const double error = cases::compare(c, id, result, expected.at(id)).ratio;
            at_64_tokens.emplace(id, error);
            EXPECT_LE(error, std::sqrt(static_cast<double>(T) / 64) * at_64_tokens.at(id))
                << name_of(id) << " after " << T << " tokens, beta " << beta;
          }
        });
      }
    }
  }
}

// beta's sigmoid stays in fp32: the state of 1024 single steps does not drift.
TEST_P(Reports, NUM_08_DecodeKeepsBetaAccurate) {
  for (const DType gate_dtype : {DType::kF32, DType::kBF16}) {
    CaseSpec spec = small_spec(1024);
    spec.sizes.K = spec.sizes.V = 16;
    spec.family = Family::kSlow;
    spec.beta_sigmoid = true;
    spec.gate_dtype = gate_dtype;
    spec.gradients = false;
    // Of one sequence Hopper rows take four tokens at a time.
    if (is_hopper()) spec.sizes.K = spec.sizes.V = 128;
    const int64_t tokens = is_hopper() ? 4 : 1;
    const Case c = make(spec);
    const TensorMap expected = cases::reference_outputs(c).value();
    attempt([&] {
      HostTensor state = c.inputs.at(kInitialState);
      for (int64_t t = 0; t < 1024; t += tokens) {
        Case step = part_of(c, 0, t, t + tokens, 0);
        step.inputs[kInitialState] = state;
        state = results_of(recurrent_problem(step), step.inputs).at(kFinalState);
      }
      EXPECT_LT(cases::compare(c, kFinalState, state, expected.at(kFinalState)).ratio, 1e-5);
    });
  }
}

/// gamma of single tokens is the gate itself: one token a batch row.
std::vector<double> gates_of(const std::string& family, const std::vector<double>& raw, Gate gate,
                             double lower_bound, const double* A_log, const double* dt_bias) {
  const auto B = static_cast<int64_t>(raw.size());
  Problem problem =
      Problem::make(Operation::kGateCumsum, {.B = B, .T = 1, .K = 1, .V = 1}, DType::kF32);
  problem.gate = gate;
  problem.lower_bound = lower_bound;
  TensorMap inputs{{kG, cases::from_doubles(DType::kF32, {B, 1, 1, 1}, raw)}};
  if (A_log != nullptr) {
    problem.set(kALog, DType::kF32);
    inputs[kALog] = cases::from_doubles(DType::kF32, {1}, std::span(A_log, 1));
  }
  if (dt_bias != nullptr) {
    problem.set(kDtBias, DType::kF32);
    inputs[kDtBias] = cases::from_doubles(DType::kF32, {1, 1}, std::span(dt_bias, 1));
  }
  std::vector<double> g =
      cases::to_doubles(run_operation(problem, inputs, choosing(family)).at(kGamma));
  for (double& x : g) x *= kLn2;
  return g;
}

TEST_P(Reports, NUM_09_BoundedGateIsTheSigmoidForm) {
  std::vector<double> raw;
  for (double x = -8; x <= 8; x += 0.25) raw.push_back(x);
  const double biases[] = {0.75, -1.25};
  attempt([&] {
    for (const double lower_bound : {-5.0, -1.0, -0.1}) {
      for (const double A_log : {-1.0, 0.0, 1.5, std::nan("")}) {
        for (const double* bias : {static_cast<const double*>(nullptr), biases, biases + 1}) {
          const bool has_slope = !std::isnan(A_log);
          const std::vector<double> g = gates_of(family(), raw, Gate::kLowerBound, lower_bound,
                                                 has_slope ? &A_log : nullptr, bias);
          for (std::size_t i = 0; i < raw.size(); ++i) {
            const double z = raw[i] + (bias == nullptr ? 0 : *bias);
            const double exact =
                lower_bound / (1 + std::exp(-(has_slope ? std::exp(A_log) : 1) * z));
            EXPECT_NEAR(g[i], exact, 2e-6 * std::fabs(exact)) << "at " << raw[i];
          }
        }
      }
    }
  });
  for (const bool slope : {false, true}) {
    CaseSpec spec = small_spec(65);
    spec.gate = Gate::kLowerBound;
    spec.a_log = slope;
    Case c = make(spec);
    set_input(c, kG, [&](int64_t i) { return raw[static_cast<std::size_t>(i) % raw.size()]; });
    expect_right(c, slope ? "with A_log" : "without A_log");
  }
}

// Pairs that causality forbids have decays past e^88: they must not reach a gradient.
TEST_P(Reports, NUM_11_MaskedPairsDoNotOverflow) {
  for (const int64_t T : {64, 256, 4096}) {
    CaseSpec spec = small_spec(T);
    if (T > 256) spec.sizes.K = spec.sizes.V = 16;
    Case c = make(spec);
    set_input(c, kG, [](int64_t i) { return uniform(i, -5, -1); });
    expect_right(c, "T " + std::to_string(T));
  }
  Problem long_one = Problem::make(Operation::kChunkBackward,
                                   {.B = 1, .T = 4096, .H = 64, .HV = 64, .K = 128, .V = 128},
                                   is_hopper() ? DType::kBF16 : DType::kF32);
  long_one.set(kDq, DType::kF32);
  // The CPU holds a few sequences at a time, CUDA tiles of all tokens.
  const auto pairs = int64_t{4096} * 64 * 128 * 64 * 4;
  const Plan plan = make_plan(long_one, device(), options()).value();
  EXPECT_LT(static_cast<int64_t>(plan.workspace_bytes()), pairs / (on_cpu() ? 20 : 5));
}

// Keys of length sqrt(K) and beta = 1: the recurrence itself diverges. It only has to end.
TEST_P(Reports, NUM_13_UnnormalisedKeysEnd) {
  for (const DType io : {DType::kF16, DType::kBF16}) {
    for (const int64_t T : {64, 256, 4096}) {
      CaseSpec spec = small_spec(T);
      if (T > 256) spec.sizes.K = spec.sizes.V = 16;
      spec.io = io;
      spec.qk_l2norm = true;
      Case c = make(spec);  // un-normalised: the operator is to do it
      set_input(c, kBeta, [](int64_t) { return 1.0; });
      expect_right(c, "normalised inside, T " + std::to_string(T));
      c.forward.qk_l2norm = false;
      attempt([&] { results_of(c); });
    }
  }
}

TEST_P(Reports, NUM_14_SinglePrecisionIsSinglePrecision) {
  Case c = cases::generate(small_spec(256));  // fp32, for every family
  set_input(c, kG, [](int64_t i) { return uniform(i, -0.1, 0); });
  expect_right(c);
}

TEST_P(Reports, NUM_15_GateAtItsBound) {
  for (const Family family : {Family::kBound, Family::kMix}) {
    for (const int64_t T : {64, 65, 256}) {
      CaseSpec spec = small_spec(T);
      spec.family = family;
      spec.gate = Gate::kLowerBound;
      spec.io = DType::kBF16;
      expect_right(make(spec));
    }
    // Many chunks, then many heads. dA_log is one number a head.
    for (const auto& [T, H] : {std::pair<int64_t, int64_t>{8192, 2}, {128, 96}}) {
      CaseSpec spec = small_spec(T);
      spec.sizes = {.B = 1, .T = T, .H = H, .HV = H, .K = 8, .V = 8};
      spec.family = family;
      spec.gate = Gate::kLowerBound;
      spec.io = DType::kBF16;
      const CaseSpec made = fitted(spec);
      const Case c = cases::generate(made);
      expect_right(c, c.name, &made);
    }
  }
}

TEST_P(Reports, NUM_18_SoftplusFarOut) {
  const std::vector<double> raw{19, 20, 21, 88, 89, 100, 1e4, -88, -104, -1e4, 0};
  const double A_log = 0.5;
  const double a = std::exp(A_log);
  attempt([&] {
    const std::vector<double> g = gates_of(family(), raw, Gate::kSoftplus, 0, &A_log, nullptr);
    for (std::size_t i = 0; i < raw.size(); ++i) {
      const double exact = -a * (raw[i] > 20 ? raw[i] : std::log1p(std::exp(raw[i])));
      EXPECT_NEAR(g[i], std::max(exact, -40.0), 2e-6 * std::fabs(exact) + 1e-37) << raw[i];
    }
  });
  CaseSpec spec = small_spec(40);
  spec.gate = Gate::kSoftplus;
  spec.dt_bias = false;
  for (const DType gate_dtype : {DType::kF32, DType::kBF16}) {
    spec.gate_dtype = gate_dtype;
    const auto far_out = [&](Case c) {
      set_input(c, kG, [&](int64_t i) { return raw[static_cast<std::size_t>(i) % raw.size()]; });
      return c;
    };
    expect_right(far_out(make(spec)));
    CaseSpec forward = spec;
    forward.gradients = false;
    const Case tokens = far_out(cases::generate(fitted_to_decode(forward, spec.sizes.T)));
    const TensorMap expected = cases::reference_outputs(tokens).value();
    attempt([&] {
      const TensorMap results = results_of(recurrent_problem(tokens), tokens.inputs);
      EXPECT_EQ(beyond(tokens, results, expected), "") << "token by token";
    });
  }
}

TEST_P(Reports, CAUSAL_02_PrefixIsBitwiseInvariant) {
  CaseSpec spec = small_spec(128);
  spec.gradients = false;
  const Case c = make(spec);
  const std::vector<TensorId> all = {kQ, kK, kV, kG, kBeta};
  const auto with = [&](const std::vector<TensorId>& ids, int64_t P, double value) {
    Case other = c;
    for (const TensorId id : ids) {
      const int64_t row = c.inputs.at(id).count() / 128;
      set_input(other, id, [&](int64_t i) {
        const double written = id == kG ? -std::fabs(value) : value;
        return i / row < P ? c.inputs.at(id).get(i) : written;
      });
    }
    return other;
  };
  attempt([&] {
    const HostTensor whole = tokens_of(results_of(c).at(kO), 0, 0, 50);
    const auto expect_kept = [&](const std::vector<TensorId>& ids, int64_t P, double value) {
      const HostTensor o = results_of(with(ids, P, value)).at(kO);
      EXPECT_EQ(other_bits(tokens_of(whole, 0, 0, P), tokens_of(o, 0, 0, P)), "")
          << P << " tokens, then " << value << " in " << (ids.size() > 1 ? "all" : name_of(ids[0]));
    };
    for (const int64_t P : {1, 15, 17, 31, 50}) {
      for (const double value : {std::nan(""), 1e4, 0.3}) expect_kept(all, P, value);
      for (const TensorId id : all) expect_kept({id}, P, std::nan(""));
    }
  });
}

// x / sqrt(sum x^2 + 1e-6): eps belongs to the sum, not to the mean.
TEST_P(Reports, L2NORM_01_EpsilonOfSmallRows) {
  for (const int64_t K : {64, 128}) {
    for (const double size : {1.0, 0.1, 0.01, 1e-3, 1e-4}) {
      CaseSpec spec = small_spec(70);
      spec.sizes.K = K;
      spec.qk_l2norm = true;
      Case c = make(spec);
      for (const TensorId id : {kQ, kK}) {
        const HostTensor unit = c.inputs.at(id);
        set_input(c, id, [&](int64_t i) { return size * unit.get(i); });
      }
      expect_right(c, "rows of size " + std::to_string(size));
      // One token without a state: o = scale beta <y_q, y_k> v, in closed form.
      Case one = part_of(c, 0, 0, 1, 0);
      one.inputs.erase(kInitialState);
      double qq = 0;
      double kk = 0;
      double qk = 0;
      double sizes = 0;
      for (int64_t i = 0; i < K; ++i) {
        const double q = one.inputs.at(kQ).get(i);
        const double k = one.inputs.at(kK).get(i);
        qq += q * q;
        kk += k * k;
        qk += q * k;
        sizes += std::fabs(q * k);
      }
      // Hopper rows multiply normalised rows in bf16.
      const double rounding = is_hopper() ? 0x1p-8 * (1 + sizes / std::fabs(qk)) : 1e-6;
      const double factor = one.forward.effective_scale() * one.inputs.at(kBeta).get(0) * qk /
                            std::sqrt(qq + 1e-6) / std::sqrt(kk + 1e-6);
      for (const Problem& problem : {forward_problem(one), recurrent_problem(one)}) {
        attempt([&] {
          const HostTensor o = results_of(problem, one.inputs).at(kO);
          for (int64_t v = 0; v < 64; ++v) {
            const double exact = factor * one.inputs.at(kV).get(v);
            EXPECT_NEAR(o.get(v), exact, rounding * std::fabs(exact) + 1e-9);
          }
        });
      }
    }
  }
}

TEST_P(Reports, BETA_01_NegativeEigenvaluesDoubleTheSigmoid) {
  CaseSpec spec = small_spec(150);
  spec.beta_sigmoid = spec.allow_neg_eigval = true;
  const Case logits = make(spec);
  expect_right(logits);
  Case direct = logits;
  direct.forward.beta_sigmoid = direct.forward.allow_neg_eigval = false;
  set_input(direct, kBeta,
            [&](int64_t i) { return 2 / (1 + std::exp(-logits.inputs.at(kBeta).get(i))); });
  const TensorMap expected = cases::reference_outputs(direct).value();
  attempt([&] {
    const TensorMap results = results_of(logits);
    HostTensor chained = expected.at(kDbeta);
    for (int64_t i = 0; i < 150; ++i) {
      const double y = direct.inputs.at(kBeta).get(i) / 2;
      chained.set(i, chained.get(i) * 2 * y * (1 - y));
      if (is_hopper()) continue;
      EXPECT_NEAR(results.at(kDbeta).get(i), chained.get(i),
                  1e-4 * std::fabs(chained.get(i)) + 1e-5);
    }
    const auto ratio_of = [&](TensorId id, const HostTensor& want) {
      return cases::compare(logits, id, results.at(id), want).ratio;
    };
    EXPECT_LT(ratio_of(kDbeta, chained), limit(1e-5, kDbeta));
    EXPECT_LT(ratio_of(kO, expected.at(kO)), limit(1e-5, kO));
  });
}

}  // namespace
}  // namespace kda::test
