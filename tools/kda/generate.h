// Cases from a seed: input families that have broken kernels, over all sizes, dtypes and options.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "case.h"

namespace kda::cases {

/// What the inputs look like. Unless said otherwise keys and queries are independent unit vectors,
/// v is normal, beta uniform in (0, 1) and the decay g uniform in [-1, 0].
enum class Family {
  kUnit,       ///< as above
  kCorr,       ///< keys are one vector of length 0.9 plus 5 % noise, beta = 1, slow decay
  kSame,       ///< keys are one vector
  kNoDecay,    ///< g = 0
  kSlow,       ///< g = -1e-4
  kBound,      ///< g = -5 everywhere
  kMix,        ///< g = -5 in half of the channels, 0 in the other half
  kDeep,       ///< g = -28, -500 or -inf at a tenth of the tokens and channels
  kReset,      ///< g = -inf in all channels of some tokens
  kSmall,      ///< q and k of size 1e-4; meant for qk_l2norm
  kZero,       ///< some rows of k and q are 0
  kPredicted,  ///< the state predicts v up to 5 %; needs an initial_state
};
inline constexpr std::array kFamilies = {Family::kUnit,    Family::kCorr, Family::kSame,
                                         Family::kNoDecay, Family::kSlow, Family::kBound,
                                         Family::kMix,     Family::kDeep, Family::kReset,
                                         Family::kSmall,   Family::kZero, Family::kPredicted};

/// "unit", "corr", ...
std::string_view name_of(Family family);

struct CaseSpec {
  uint64_t seed = 1;
  Family family = Family::kUnit;
  Sizes sizes{1, 130, 2, 2, 64, 64, 0, 0};
  DType io = DType::kF32;               ///< of q, k, v, do
  DType gate_dtype = DType::kF32;       ///< of g and beta
  DType parameter_dtype = DType::kF32;  ///< of A_log and dt_bias
  /// With a gate, g is the raw input for which the gate gives the decay of the family (as near as
  /// the form of the gate allows: a lower bound is a bound).
  Gate gate = Gate::kNone;
  double lower_bound = -5;  ///< used with Gate::kLowerBound
  bool a_log = true;        ///< gives A_log, with a gate; the softplus gate always has it
  bool dt_bias = true;      ///< gives dt_bias, with a gate
  bool qk_l2norm = false;
  bool beta_sigmoid = false;
  bool allow_neg_eigval = false;
  bool state_v_first = false;
  bool initial_state = true;
  bool gradients = true;     ///< gives `do`
  bool dfinal_state = true;  ///< with gradients
  int32_t chunk_size = 64;
  std::optional<double> scale;
  /// Starts of packed sequences; sizes.N follows. Empty: fixed length.
  std::vector<int64_t> cu_seqlens;
  DType cu_dtype = DType::kI64;
  /// Fills the rows that no sequence owns with NaN instead of ordinary values.
  bool poison_tail = false;
};

/// "unit B1 T130 H2 HV2 K64 V64 fp32 seed 1", with the options that are not default.
std::string describe(const CaseSpec& spec);

/// Sizes and options of the case, without tensors: a chunk forward.
Problem options_of(const CaseSpec& spec);

/// The case; `expected` is empty. The spec must be one that Problem::validated accepts.
Case generate(const CaseSpec& spec);

}  // namespace kda::cases
