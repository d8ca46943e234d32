// The operations of the float64 reference family. Each has a run function and the scratch that one
// thread of it needs, in doubles.
#pragma once

#include <cstdint>

#include "cpu/reference_run.h"
#include "kda/problem.h"
#include "kda/status.h"

namespace kda::reference {

// Token by token: (2.1)-(2.5) and (2.6)-(2.13), with section 3.
Status chunk_forward(const Run& run);
int64_t chunk_forward_scratch(const Problem& problem);
Status chunk_backward(const Run& run);
int64_t chunk_backward_scratch(const Problem& problem);
/// Partial sums of the parameter gradients, one per sequence.
int64_t chunk_backward_shared(const Problem& problem);
/// kInvalidArgument for a slot outside the pool or used twice.
Status recurrent(const Run& run);

// Stages, chunk by chunk.
Status gate_cumsum(const Run& run);
int64_t gate_cumsum_scratch(const Problem& problem);
Status intra(const Run& run);
int64_t intra_scratch(const Problem& problem);
Status wu(const Run& run);
int64_t wu_scratch(const Problem& problem);
Status state_scan(const Run& run);
int64_t state_scan_scratch(const Problem& problem);
Status output(const Run& run);
int64_t output_scratch(const Problem& problem);
Status reverse_scan(const Run& run);
int64_t reverse_scan_scratch(const Problem& problem);
Status wy_backward(const Run& run);
int64_t wy_backward_scratch(const Problem& problem);
Status intra_backward(const Run& run);
int64_t intra_backward_scratch(const Problem& problem);

}  // namespace kda::reference
