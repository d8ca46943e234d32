// Runs a test on every instruction set in this build that the machine has.
#pragma once

#include <cstdint>

#include <gtest/gtest.h>
#include <hwy/targets.h>

namespace kda {

/// Makes the dispatcher choose one instruction set, and all again at the end.
class OnlyTarget {
 public:
  explicit OnlyTarget(int64_t target) { choose(target); }
  OnlyTarget(const OnlyTarget&) = delete;
  OnlyTarget& operator=(const OnlyTarget&) = delete;
  ~OnlyTarget() { choose(0); }

 private:
  static void choose(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

template <class Body>
void for_each_target(const Body& body) {
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t rest = supported; rest != 0; rest &= rest - 1) {
    const OnlyTarget only(rest & -rest);
    SCOPED_TRACE(hwy::TargetName(rest & -rest));
    body();
  }
}

}  // namespace kda
