// What is built in and what this machine has.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "kda/plan.h"

namespace kda {

/// One entry of the ordered list of implementations.
struct ImplementationInfo {
  std::string_view name;    ///< "cpu_chunk_fwd"
  std::string_view family;  ///< "cpu"
  Operation operation;
  DeviceType device;
  std::string_view features;  ///< What it takes, one line.
};

/// Every implementation in this build, per operation and device in the order of preference.
std::vector<ImplementationInfo> implementations();

/// The verdict of one implementation on a problem.
struct Verdict {
  std::string_view name;
  bool supported;
  bool chosen;
  std::string reason;           ///< Why not; empty if supported.
  std::size_t workspace_bytes;  ///< Plan::workspace_bytes(); 0 if not supported.
};

/// Asks every implementation of the problem's operation on that device, in order. The chosen one is
/// what make_plan takes.
Result<std::vector<Verdict>> explain(const Problem& problem, const Device& device = {},
                                     const Options& options = {});

/// Facts about a device.
struct DeviceInfo {
  Device device;
  std::string name;
  std::string features;  ///< CPU: SIMD targets, threads. CUDA: compute capability, SMs.
  std::size_t memory_bytes = 0;
};

/// The devices that this build can use here: the CPU always, then CUDA devices.
std::vector<DeviceInfo> devices();

/// "built without CUDA", "no CUDA driver", ...; empty if CUDA is usable.
std::string cuda_unavailable_reason();

}  // namespace kda
