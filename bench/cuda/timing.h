// Device memory with random values, and times of launches from a cold L2.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kda::bench {

/// Ends the program with the error's text.
void require(cudaError_t error);

/// `"machine": ..., "date": ..., "command": ...`, the head of a results file.
std::string run_header(int argc, char** argv);

/// Memory of one arena, which is reused when no buffer is left.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  void* data() const { return data_; }

  /// Uniform in (low, high), a hash of the index.
  void fill_bf16(float low, float high);
  void fill_fp32(float low, float high);

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

struct Times {
  double median_ms;
  double p20_ms;
  double p80_ms;
};

/// Times of each launch, taken in turns, after one run that warms up; L2 is overwritten before
/// each.
std::vector<Times> time_in_turns(const std::vector<std::function<void()>>& launches, int repeats);

}  // namespace kda::bench
