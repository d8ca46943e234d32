// The operations of the fast CPU backend: per operation its tasks and the memory they need.
#pragma once

#include <cstdint>

#include "cpu/cpu_run.h"

namespace kda::cpu {

/// How the work of an operation is cut; heads run fastest.
enum class TaskKind { kSequenceValueHead, kSequenceHead, kChunkValueHead, kChunkHead };

/// One operation. Tasks of a run are independent and write disjoint outputs.
struct Kernel {
  Operation operation;
  TaskKind kind;
  /// Floats of scratch that a thread needs.
  int64_t (*scratch)(const Problem& problem);
  void (*run)(const Run& run, const Task& task);
  /// Bytes that all tasks share, and the step over value heads that follows them; null if none.
  int64_t (*shared)(const Problem& problem) = nullptr;
  void (*finish)(const Run& run, int64_t hv, const std::byte* shared, float* scratch) = nullptr;
};

/// chunk_fwd.cc
Kernel chunk_forward_kernel();
/// chunk_bwd.cc
Kernel chunk_backward_kernel();
/// recurrent.cc
Kernel recurrent_kernel();
/// stages_fwd.cc
Kernel gate_cumsum_kernel();
Kernel intra_kernel();
Kernel wu_kernel();
Kernel state_scan_kernel();
Kernel output_kernel();
/// stages_bwd.cc
Kernel reverse_scan_kernel();
Kernel wy_backward_kernel();
Kernel intra_backward_kernel();

}  // namespace kda::cpu
