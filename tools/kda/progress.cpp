#include "progress.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

#include <fmt/format.h>

namespace kda::program {

Progress::Progress(std::string label) : label_(std::move(label)) {
  if (isatty(STDERR_FILENO) != 0) thread_ = std::thread([this] { show(); });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Progress::step(const std::string& what) {
  const std::lock_guard lock(mutex_);
  what_ = what;
}

void Progress::show() {
  using std::chrono::steady_clock;
  const auto start = steady_clock::now();
  bool shown = false;
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::milliseconds(shown ? 250 : 1000),
                         [this] { return done_; })) {
    const double seconds = std::chrono::duration<double>(steady_clock::now() - start).count();
    fmt::print(stderr, "\r\033[K{} {} ({:.0f} s)", label_, what_, seconds);
    std::fflush(stderr);
    shown = true;
  }
  if (shown) fmt::print(stderr, "\r\033[K");
}

}  // namespace kda::program
