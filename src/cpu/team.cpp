#include "cpu/team.h"

#include <pthread.h>

#include <atomic>

namespace kda::cpu {
namespace {

std::atomic<bool> had_team{false};
std::atomic<bool> lost_team{false};

/// Calls in the child of a fork, on its only thread.
void note_fork() { lost_team.store(had_team.load()); }

/// If the system has no memory for it, children of a fork are as OpenMP leaves them.
[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, note_fork);

}  // namespace

int team_size(int wanted) {
  if (wanted <= 1 || lost_team.load(std::memory_order_relaxed)) return 1;
  had_team.store(true, std::memory_order_relaxed);
  return wanted;
}

}  // namespace kda::cpu
