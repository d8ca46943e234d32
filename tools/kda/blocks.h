// Work on large host tensors by several threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace kda::cases {

/// work(begin, end) over `count` items of `size` elements, by several threads where that is much:
/// inputs of a benchmark are up to some hundred million elements.
template <class Work>
void in_blocks(int64_t count, int64_t size, const Work& work) {
  constexpr int64_t kLeast = int64_t{1} << 18;  // draws of about 20 ms
  const int64_t most = std::max(1U, std::thread::hardware_concurrency());
  const int64_t blocks = std::clamp<int64_t>(count * size / kLeast, 1, most);
  std::vector<std::jthread> others;
  for (int64_t i = 1; i < blocks; ++i) {
    others.emplace_back([&work, first = count * i / blocks, last = count * (i + 1) / blocks] {
      work(first, last);
    });
  }
  work(0, count / blocks);
}

}  // namespace kda::cases
