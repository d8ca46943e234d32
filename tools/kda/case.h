// A case: inputs and options of one forward and backward, and what should come out.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kda/problem.h"
#include "kda/status.h"
#include "safetensors.h"
#include "tensor.h"

namespace kda::cases {

using TensorMap = std::map<TensorId, HostTensor>;

struct Case {
  std::string name;  ///< path of the file, or a description of the seed
  std::string note;
  /// A chunk forward with sizes, options and the inputs; outputs have their public dtypes.
  Problem forward;
  TensorMap inputs;
  TensorMap expected;  ///< empty if unknown
  /// Keys repeat, or the state predicts v: 16-bit operands cannot reach 7.3 (6.4).
  bool ill_conditioned = false;

  bool has_gradients() const { return inputs.count(TensorId::kDo) != 0; }
  const HostTensor* input(TensorId id) const;
};

/// The tensors that a case file may hold, `do` and the like included.
inline constexpr TensorId kCaseInputs[] = {
    TensorId::kQ,    TensorId::kK,           TensorId::kV,        TensorId::kG,
    TensorId::kBeta, TensorId::kALog,        TensorId::kDtBias,   TensorId::kInitialState,
    TensorId::kDo,   TensorId::kDfinalState, TensorId::kCuSeqlens};
/// What a case can ask for, in the order of reports.
inline constexpr TensorId kCaseOutputs[] = {
    TensorId::kO,       TensorId::kFinalState,   TensorId::kDq,    TensorId::kDk,
    TensorId::kDv,      TensorId::kDg,           TensorId::kDbeta, TensorId::kDALog,
    TensorId::kDdtBias, TensorId::kDinitialState};

/// Reads a case file. Metadata keys and tensors that the format does not know are refused: a
/// misspelt option must not be ignored. An empty metadata value counts as missing.
Result<Case> load_case(const std::string& path);
/// The same from a file that was read.
Result<Case> make_case(const std::string& name, TensorFile file);
/// The file that load_case reads back as the same case.
TensorFile to_file(const Case& c);

/// Which dtypes the outputs get.
struct OutputTypes {
  /// Of all outputs; absent: o as q, gradients as their tensor, states fp32 or as given.
  std::optional<DType> all;
};

/// The forward with o and final_state.
Problem forward_problem(const Case& c, OutputTypes types = {});
/// The same token by token.
Problem recurrent_problem(const Case& c, OutputTypes types = {});
/// The backward with every gradient; dinitial_state is asked for without an initial_state too.
/// Only for a case with `do`.
Problem backward_problem(const Case& c, OutputTypes types = {});

/// The case with q, k, v and do rounded to another dtype. Expected values stay.
Case with_dtype(const Case& c, DType dtype);

/// First and last token of every sequence, per batch row or by cu_seqlens.
struct TokenRange {
  int64_t batch;
  int64_t begin;
  int64_t end;
};
std::vector<TokenRange> sequences_of(const Case& c);

}  // namespace kda::cases
