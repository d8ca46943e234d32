// Zeros in the rows of outputs that belong to no sequence.
#pragma once

#include "core/sequences.h"
#include "kda/plan.h"
#include "kda/problem.h"

namespace kda {

/// Writes zeros to token rows at or after cu_seqlens[N] and to chunk rows beyond the used ones, in
/// every output of the problem, and to dA_log and ddt_bias where nothing at all runs.
void zero_padding(const Problem& problem, const Args& args, const SequenceList& list);

}  // namespace kda
