// Checks of the addresses of one run.
#include <cstdint>

#include <fmt/format.h>

#include "core/executor.h"
#include "core/shape.h"

namespace kda {
namespace {

struct Range {
  TensorId id;
  Role role;
  std::uintptr_t begin;  // of the first element
  std::uintptr_t last;   // of the last element
  std::uintptr_t end;
  bool dense;  // no gaps: every byte from begin to end belongs to an element

  bool holds(std::uintptr_t address) const { return begin <= address && address < end; }
};

/// True only if the two surely share an element. Views that interleave (heads of one buffer) have
/// ranges that overlap without that.
bool share_memory(const Range& a, const Range& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (a.dense && b.dense) return true;
  if (a.begin == b.begin || a.last == b.last) return true;
  return (a.dense && (a.holds(b.begin) || a.holds(b.last))) ||
         (b.dense && (b.holds(a.begin) || b.holds(a.last)));
}

bool may_share(const Problem& problem, const Range& a, const Range& b) {
  const bool states = (a.id == TensorId::kInitialState && b.id == TensorId::kFinalState) ||
                      (a.id == TensorId::kFinalState && b.id == TensorId::kInitialState);
  return states && a.begin == b.begin && problem[a.id].dtype == problem[b.id].dtype &&
         problem[a.id].stride == problem[b.id].stride;
}

Status overlap(const Range& a, std::string_view other) {
  return {StatusCode::kInvalidArgument, fmt::format("{}: its memory overlaps {}, expected outputs "
                                                    "and the workspace apart from everything else",
                                                    name_of(a.id), other)};
}

}  // namespace

Status check_args(const Problem& problem, const Args& args, std::size_t workspace_bytes,
                  std::size_t workspace_alignment) {
  std::array<Range, kTensorCount> ranges;
  std::size_t count = 0;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const TensorLayout& layout = problem[spec.id];
    if (!layout.present() || count_elements(layout) == 0) continue;
    const auto address = reinterpret_cast<std::uintptr_t>(args[spec.id]);
    if (address == 0) {
      return {StatusCode::kInvalidArgument, fmt::format("{}: null address, expected {} bytes",
                                                        name_of(spec.id), problem.bytes(spec.id))};
    }
    if (address % size_of(layout.dtype) != 0) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: address {:#x} is not a multiple of {}, the size of {}",
                          name_of(spec.id), address, size_of(layout.dtype), name_of(layout.dtype))};
    }
    const std::uintptr_t end = address + static_cast<std::uintptr_t>(problem.bytes(spec.id));
    ranges[count++] = {spec.id, spec.role,
                       address, end - size_of(layout.dtype),
                       end,     span_elements(layout) == count_elements(layout)};
  }
  const auto workspace = reinterpret_cast<std::uintptr_t>(args.workspace);
  if (args.workspace_bytes < workspace_bytes || (workspace_bytes > 0 && workspace == 0)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("workspace: found {} bytes at {:#x}, expected {} bytes "
                        "(Plan::workspace_bytes)",
                        args.workspace_bytes, workspace, workspace_bytes)};
  }
  if (workspace_bytes > 0 && workspace % workspace_alignment != 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("workspace: address {:#x}, expected a multiple of {}", workspace,
                        workspace_alignment)};
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Range& a = ranges[i];
    if (workspace_bytes > 0 && a.begin < workspace + workspace_bytes && workspace < a.end) {
      return overlap(a, "the workspace");
    }
    if (a.role != Role::kOutput) continue;
    for (std::size_t j = 0; j < count; ++j) {
      const Range& b = ranges[j];
      if (i != j && share_memory(a, b) && !may_share(problem, a, b))
        return overlap(a, name_of(b.id));
    }
  }
  return {};
}

}  // namespace kda
