#include "cpu/team.h"

#include <pthread.h>

#include <algorithm>
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

int threads_within(std::size_t limit, int threads, int64_t shared, int64_t each) {
  if (limit == 0 || each == 0) return threads;
  const auto most = static_cast<std::size_t>(threads);
  const std::size_t room = limit - std::min(limit, static_cast<std::size_t>(shared));
  return static_cast<int>(std::clamp<std::size_t>(room / static_cast<std::size_t>(each), 1, most));
}

}  // namespace kda::cpu
