// Many threads at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace kda::test {

/// Starts `work(i)` on so many threads at the same time and waits for all.
template <class Work>
void together(int count, const Work& work) {
  std::atomic<int> waiting{count};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      --waiting;
      while (waiting.load() > 0) std::this_thread::yield();
      work(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// 64 threads with a `Steps` each, which run steps i to i + turns, get what one thread got before.
/// `run(steps, step)` gives "" or what went wrong, `outputs(steps, step)` what has to be the same.
template <class Steps, class Run, class Outputs>
void expect_own_outputs(int64_t turns, const Run& run, const Outputs& outputs) {
  constexpr int kThreads = 64;
  std::vector<decltype(outputs(std::declval<Steps&>(), 0))> expected;
  {
    Steps steps;
    for (int64_t step = 0; step < kThreads + turns; ++step) {
      ASSERT_EQ(run(steps, step), "");
      expected.push_back(outputs(steps, step));
    }
  }
  std::vector<std::string> reports(kThreads);
  together(kThreads, [&](int i) {
    Steps steps;
    std::string& report = reports[static_cast<std::size_t>(i)];
    for (int64_t step = i; step < i + turns && report.empty(); ++step) {
      report = run(steps, step);
      if (report.empty() && outputs(steps, step) != expected[static_cast<std::size_t>(step)]) {
        report = "other bits in step " + std::to_string(step);
      }
    }
  });
  for (const std::string& report : reports) EXPECT_EQ(report, "");
}

}  // namespace kda::test
