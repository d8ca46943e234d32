// Running cases and taking their tensors apart.
#pragma once

#include <string>
#include <vector>

#include "support/names.h"

namespace kda::test {

/// The families of implementations for the CPU.
const std::vector<std::string>& families_of_cpu();
/// Those that this machine can run: the CPU's, and "cuda" where there is a device for it.
const std::vector<std::string>& families();

/// The implementation or family, on the device that it is for.
Conditions choosing(const std::string& implementation);

/// Forward and, with `do`, backward of a case in guarded memory. Throws kda::Error.
TensorMap run_case(const Case& c, const Conditions& conditions, OutputTypes types = {});
TensorMap run_case(const Case& c, const std::string& implementation, OutputTypes types = {});

/// The outputs of one operation. Throws kda::Error.
TensorMap run_operation(const Problem& problem, const TensorMap& inputs,
                        const Conditions& conditions);

/// "" or the outputs that are further from `expected` than 7.3 allows for their dtype, globally or
/// in a block.
std::string beyond_limits(const Case& c, const TensorMap& results, const TensorMap& expected);

/// Tokens [begin, end) of a batch row of a tensor [B,T,...]: [1, end - begin, ...].
HostTensor tokens_of(const HostTensor& tensor, int64_t batch, int64_t begin, int64_t end);
/// Row `index` of the first dimension, which stays with extent 1.
HostTensor row_of(const HostTensor& tensor, int64_t index);
/// One behind the other along the first dimension.
HostTensor stacked(const std::vector<HostTensor>& rows);

bool has_tokens(TensorId id);
bool has_states(TensorId id);

/// The tokens [begin, end) of a batch row as a case of its own, with state row `state`. Expected
/// values are dropped.
Case part_of(const Case& c, int64_t batch, int64_t begin, int64_t end, int64_t state);
/// Sequence n of a packed or batched case, alone.
Case sequence_of(const Case& c, std::size_t n);

/// "" or the first element of `a` whose bits differ in `b`.
std::string other_bits(const HostTensor& a, const HostTensor& b);
std::string other_bits(const TensorMap& a, const TensorMap& b);

}  // namespace kda::test
