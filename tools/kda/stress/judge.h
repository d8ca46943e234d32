// Runs a drawn problem on an implementation and says what is wrong with the result.
#pragma once

#include <string>
#include <vector>

#include "kda/backend.h"
#include "stress/trial.h"

namespace kda::stress {

/// Something that is not as it must be.
struct Fault {
  std::string output;  ///< name of the tensor; empty where no single one is at fault
  std::string text;    ///< one line
  double ratio = 0;    ///< of output to limit, where the numbers are what is wrong
  double limit = 0;
};

struct Judgement {
  bool ran = false;
  /// The implementation refused the addresses, so that the default's generic kernels ran.
  bool by_default = false;
  /// Why the implementation does not take the problem; empty if it does.
  std::string refusal;
  std::vector<Fault> faults;
  /// The device cannot be used any more, so that nothing after this means anything.
  bool device_lost = false;
};

/// Runs the problem in guarded memory: twice, on the CPU with other numbers of threads, on a device
/// as a graph; family cpu once more for fp32 outputs. `threads` > 0 overrides the drawn numbers.
Judgement judge(const Trial& trial, const ImplementationInfo& implementation, const Device& device,
                int threads = 0);

/// The faults of given outputs. Limits are those of docs/semantics.md 7.3, as told there for random
/// problems; zeros and unchanged states are exact.
std::vector<Fault> faults_of(const Trial& trial, std::string_view family,
                             const cases::TensorMap& outputs);

}  // namespace kda::stress
