#include "cpu/cpu_info.h"

#include <omp.h>
#include <unistd.h>

#include <fstream>

#include <fmt/format.h>
#include <hwy/targets.h>

namespace kda {
namespace {

std::string model_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "CPU";
}

/// The instruction sets that both this build and this machine have, best first.
std::string simd_targets() {
  std::string names;
  for (int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    names += fmt::format("{}{}", names.empty() ? "" : " ", hwy::TargetName(rest & -rest));
  }
  return names;
}

}  // namespace

DeviceInfo cpu_device_info() {
  const auto pages = sysconf(_SC_PHYS_PAGES);
  const auto page_bytes = sysconf(_SC_PAGE_SIZE);
  return {{DeviceType::kCpu, 0},
          model_name(),
          fmt::format("{} threads; SIMD {}", omp_get_max_threads(), simd_targets()),
          pages > 0 && page_bytes > 0
              ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(page_bytes)
              : 0};
}

}  // namespace kda
