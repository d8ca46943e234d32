#include "property/drawing.h"

#include <algorithm>
#include <ostream>

namespace kda::cases {

void showValue(const CaseSpec& spec, std::ostream& out) { out << describe(spec); }

}  // namespace kda::cases

namespace kda::test {
namespace {

namespace gen = rc::gen;

/// Elements of [B,T,HV,K,V] work per case: about 10 ms of float64 token recurrence.
constexpr int64_t kMostWork = 600'000;

template <class T>
T pick(const std::vector<T>& values) {
  return *gen::elementOf(values);
}

bool flip() { return *gen::inRange(0, 2) == 1; }

void draw_sizes(CaseSpec& spec, const Wanted& wanted) {
  Sizes& s = spec.sizes;
  s.H = *gen::inRange<int64_t>(1, 3);
  s.HV = s.H * pick<int64_t>({1, 1, 2, 3});
  s.K = *gen::weightedOneOf<int64_t>({{3, gen::element<int64_t>(16, 32, 64)},
                                      {3, gen::inRange<int64_t>(1, 40)},
                                      {1, gen::element<int64_t>(60, 100, 128, 192, 255, 256)}});
  s.V = *gen::weightedOneOf<int64_t>({{3, gen::element<int64_t>(16, 32, 64)},
                                      {3, gen::inRange<int64_t>(1, 40)},
                                      {1, gen::element<int64_t>(65, 100, 128, 130)}});
  const int64_t affordable = std::max<int64_t>(1, kMostWork / (s.HV * s.K * s.V));
  const int64_t most = std::min(wanted.most_tokens, affordable);
  s.T = std::min(most, *gen::weightedOneOf<int64_t>(
                           {{2, gen::element<int64_t>(1, 2, 15, 16, 17, 31, 32, 33)},
                            {3, gen::element<int64_t>(63, 64, 65, 96, 127, 128, 129, 150)},
                            {2, gen::inRange<int64_t>(0, 201)}}));
  s.B = 2 * s.T <= most ? *gen::inRange<int64_t>(1, 3) : 1;
}

/// Cuts of [0, T], with empty sequences, one-token sequences and rows behind the last one.
void draw_packing(CaseSpec& spec) {
  Sizes& s = spec.sizes;
  s.T = s.B * s.T + *gen::inRange<int64_t>(0, 4);
  s.B = 1;
  const auto count = *gen::inRange<std::size_t>(0, 6);
  std::vector<int64_t> cu =
      *gen::container<std::vector<int64_t>>(count, gen::inRange<int64_t>(0, s.T + 1));
  if (!cu.empty() && flip()) cu.push_back(std::min(s.T, cu.front() + 1));
  if (flip() || (cu.empty() && s.T > 0)) cu.push_back(s.T);
  cu.push_back(0);
  std::sort(cu.begin(), cu.end());
  spec.cu_seqlens = cu;
  spec.cu_dtype = flip() ? DType::kI32 : DType::kI64;
  spec.poison_tail = flip();
}

void draw_types(CaseSpec& spec, const Wanted& wanted) {
  if (!wanted.reduced_types) return;
  spec.io = pick<DType>({DType::kF32, DType::kF32, DType::kBF16, DType::kF16});
  spec.gate_dtype = pick<DType>({DType::kF32, DType::kF32, DType::kBF16, DType::kF16});
  spec.parameter_dtype = pick<DType>({DType::kF32, DType::kBF16});
}

void draw_options(CaseSpec& spec, const Wanted& wanted) {
  if (wanted.gates) {
    spec.gate = pick<Gate>({Gate::kNone, Gate::kNone, Gate::kSoftplus, Gate::kLowerBound});
    spec.lower_bound = pick<double>({-5, -1});
    spec.a_log = flip();
    spec.dt_bias = flip();
  }
  spec.qk_l2norm = flip() || spec.family == Family::kSmall;  // else o is nothing but silence
  spec.beta_sigmoid = flip();
  spec.allow_neg_eigval = spec.beta_sigmoid && flip();
  spec.state_v_first = flip();
  spec.initial_state = flip();
  spec.dfinal_state = flip();
  spec.chunk_size = flip() ? 32 : 64;
  if (flip()) spec.scale = pick<double>({0.1, 1.0});
}

void draw_family(CaseSpec& spec, const Wanted& wanted) {
  std::vector<Family> families{Family::kUnit,  Family::kCorr, Family::kNoDecay, Family::kSlow,
                               Family::kBound, Family::kMix,  Family::kZero};
  if (wanted.extreme) {
    families.insert(families.end(), {Family::kSame, Family::kDeep, Family::kReset, Family::kSmall});
  }
  spec.family = pick(families);
}

}  // namespace

rc::Gen<CaseSpec> any_case(const Wanted& wanted) {
  return gen::exec([wanted] {
    CaseSpec spec;
    spec.seed = *gen::inRange<uint64_t>(1, 1000);
    draw_family(spec, wanted);
    draw_sizes(spec, wanted);
    draw_types(spec, wanted);
    draw_options(spec, wanted);
    if (wanted.only_packed || (wanted.packed && flip())) draw_packing(spec);
    return spec;
  });
}

}  // namespace kda::test
