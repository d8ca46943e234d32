// Checks of the addresses of one run.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

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
  bool dense;  // every byte from begin to end belongs to an element

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

/// No place between the first and the last element is left out. Repeats (stride 0) do not count.
bool is_dense(const TensorLayout& layout) {
  std::array<std::size_t, 4> order{0, 1, 2, 3};
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return layout.stride[a] < layout.stride[b]; });
  int64_t next = 1;  // the stride that continues the places covered so far
  for (const std::size_t dim : order) {
    if (layout.shape[dim] <= 1 || layout.stride[dim] == 0) continue;
    if (layout.stride[dim] != next) return false;
    next *= layout.shape[dim];
  }
  return true;
}

/// The same address, dtype and strides; strides of dimensions with one entry say nothing.
bool same_memory(const Problem& problem, const Args& args, TensorId a, TensorId b) {
  const TensorLayout& x = problem[a];
  const TensorLayout& y = problem[b];
  for (std::size_t i = 0; i < 4; ++i) {
    if (x.shape[i] > 1 && x.stride[i] != y.stride[i]) return false;
  }
  return args[a] == args[b] && x.dtype == y.dtype && x.shape == y.shape;
}

bool are_states(TensorId a, TensorId b) {
  return (a == TensorId::kInitialState && b == TensorId::kFinalState) ||
         (a == TensorId::kFinalState && b == TensorId::kInitialState);
}

/// Slots that no sequence names and states that keep no token are not written: in memory of their
/// own they would stay undefined.
Status check_in_place(const Problem& problem, const Args& args) {
  if (!problem.has(TensorId::kFinalState)) return {};
  if (same_memory(problem, args, TensorId::kInitialState, TensorId::kFinalState)) return {};
  for (const auto& [id, what] : {std::pair{TensorId::kStateIndices, "the pool is"},
                                 std::pair{TensorId::kNumAccepted, "states are"}}) {
    if (!problem.has(id)) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("final_state: with {} it must be the same memory as initial_state "
                        "(address, dtype and strides): {} updated in place",
                        name_of(id), what)};
  }
  return {};
}

Status overlap(TensorId id, std::string_view other, std::string_view unless = "") {
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: its memory overlaps {}, expected outputs and the workspace apart from "
                      "everything else{}",
                      name_of(id), other, unless)};
}

Status check_overlap(const Problem& problem, const Args& args, const Range& a, const Range& b) {
  if (!share_memory(a, b)) return {};
  if (!are_states(a.id, b.id)) return overlap(a.id, name_of(b.id));
  if (same_memory(problem, args, a.id, b.id)) return {};
  return overlap(a.id, name_of(b.id), ", or both the same memory: address, dtype and strides");
}

/// No byte may have an address below the first one.
bool wraps(std::uintptr_t address, std::uintptr_t bytes) {
  return bytes > std::numeric_limits<std::uintptr_t>::max() - address;
}

template <class Bytes>
Status leaves_address_space(std::string_view name, Bytes bytes, std::uintptr_t address) {
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: {} bytes from address {:#x} leave the address space, expected the "
                      "address of memory that holds them",
                      name, bytes, address)};
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
              fmt::format("{}: address {:#x}, expected a multiple of {}, the size of {}",
                          name_of(spec.id), address, size_of(layout.dtype), name_of(layout.dtype))};
    }
    if (wraps(address, static_cast<std::uintptr_t>(problem.bytes(spec.id)))) {
      return leaves_address_space(name_of(spec.id), problem.bytes(spec.id), address);
    }
    const std::uintptr_t end = address + static_cast<std::uintptr_t>(problem.bytes(spec.id));
    ranges[count++] = {spec.id, spec.role,       address, end - size_of(layout.dtype),
                       end,     is_dense(layout)};
  }
  if (Status status = check_in_place(problem, args); !status.ok()) return status;
  const auto workspace = reinterpret_cast<std::uintptr_t>(args.workspace);
  if (workspace_bytes > 0 && workspace == 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("workspace: null address, expected {} bytes (Plan::workspace_bytes)",
                        workspace_bytes)};
  }
  if (args.workspace_bytes < workspace_bytes) {
    return {StatusCode::kInvalidArgument,
            fmt::format("workspace: found {} bytes at {:#x}, expected {} bytes "
                        "(Plan::workspace_bytes)",
                        args.workspace_bytes, workspace, workspace_bytes)};
  }
  if (wraps(workspace, workspace_bytes)) {
    return leaves_address_space("workspace", workspace_bytes, workspace);
  }
  if (workspace_bytes > 0 && workspace % workspace_alignment != 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("workspace: address {:#x}, expected a multiple of {}", workspace,
                        workspace_alignment)};
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Range& a = ranges[i];
    if (workspace_bytes > 0 && a.begin < workspace + workspace_bytes && workspace < a.end) {
      return overlap(a.id, "the workspace");
    }
    if (a.role != Role::kOutput) continue;
    for (std::size_t j = 0; j < count; ++j) {
      if (i == j) continue;
      if (Status status = check_overlap(problem, args, a, ranges[j]); !status.ok()) return status;
    }
  }
  return {};
}

}  // namespace kda
