// Problems, random inputs and runs for the tests of the CPU families.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kda/kda.h"

namespace kda {

/// Values in the order of the canonical shape, whatever dtype and strides the problem asks for.
using Values = std::vector<double>;
using Tensors = std::map<TensorId, Values>;

/// Elements of a tensor's canonical shape.
int64_t elements(const Problem& problem, TensorId id);

/// The problem with another operation: sizes and options stay, inputs that both have stay, and of
/// the other tensors the required ones are there.
Problem with_operation(const Problem& problem, Operation operation);

/// Asks for every output, in fp64.
Problem& want_all(Problem& problem);

/// Makes a problem packed with these lengths; T keeps what is left as padding.
Problem& pack(Problem& problem, const std::vector<int64_t>& lengths);
Values starts_of(const std::vector<int64_t>& lengths);

/// Ordinary values for every input present: short keys, decays in (-1, 0) or raw gates ~ N(0, 1),
/// write strengths in (0, 1) or logits ~ N(0, 1). cu_seqlens and state_indices are left out.
Tensors random_inputs(const Problem& problem, unsigned seed);

/// Runs on memory that is filled with NaN first, so that what is not written shows. Rounds the
/// inputs to their dtypes. final_state shares the memory of initial_state if `in_place`.
struct RunOptions {
  int32_t threads = 0;
  bool in_place = false;
  const char* implementation = "reference";
};
Result<Tensors> try_run(const Problem& problem, const Tensors& inputs,
                        const RunOptions& options = {});
/// As above; throws kda::Error on a failure.
Tensors run(const Problem& problem, const Tensors& inputs, const RunOptions& options = {});

/// max |x - reference| / max |reference|, or max |x - reference| where the reference is all zero;
/// infinity if sizes differ or a NaN occurs.
double relative_error(const Values& reference, const Values& x);

}  // namespace kda
