#include "timing.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace kda::bench {
namespace {

constexpr std::size_t kFlushBytes = std::size_t{256} << 20;
constexpr int kBlocks = 1024;
constexpr int kThreads = 256;

constexpr std::size_t kArenaBytes = std::size_t{16} << 30;

/// All memory of the program, taken once: after large buffers were freed and others allocated, the
/// same launch was seen to take 13 % longer.
struct Arena {
  char* base = nullptr;
  std::size_t used = 0;
  int buffers = 0;

  static Arena& instance() {
    static Arena arena;
    if (arena.base == nullptr) {
      void* memory = nullptr;
      require(cudaMalloc(&memory, kArenaBytes));
      arena.base = static_cast<char*>(memory);
    }
    return arena;
  }
};

template <class T>
__global__ void fill(T* data, std::size_t count, float low, float high) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t bits = static_cast<uint32_t>(i) * 2654435761u;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    data[i] = static_cast<T>(low + (high - low) * static_cast<float>(bits >> 8) * 0x1p-24f);
  }
}

}  // namespace

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

std::string run_header(int argc, char** argv) {
  cudaDeviceProp properties;
  require(cudaGetDeviceProperties(&properties, 0));
  const std::time_t now = std::time(nullptr);
  std::string date(32, '\0');
  date.resize(std::strftime(date.data(), date.size(), "%FT%TZ", std::gmtime(&now)));
  std::string command;
  for (int i = 0; i < argc; ++i) {
    std::string word = argv[i];
    if (i == 0) word = word.substr(word.find_last_of('/') + 1);
    command += (i > 0 ? " " : "") + word;
  }
  return "\"machine\": \"" + std::string(properties.name) + "; " +
         std::to_string(properties.multiProcessorCount) + " SMs\", \"date\": \"" + date +
         "\", \"command\": \"" + command + "\"";
}

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  constexpr std::size_t kAlignment = std::size_t{2} << 20;
  Arena& arena = Arena::instance();
  data_ = arena.base + arena.used;
  arena.used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  ++arena.buffers;
  if (arena.used <= kArenaBytes) return;
  std::fprintf(stderr, "the buffers need more than %zu bytes\n", kArenaBytes);
  std::exit(1);
}

Buffer::~Buffer() {
  Arena& arena = Arena::instance();
  if (--arena.buffers == 0) arena.used = 0;
}

void Buffer::fill_bf16(float low, float high) {
  fill<<<kBlocks, kThreads>>>(static_cast<__nv_bfloat16*>(data_), bytes_ / 2, low, high);
  require(cudaGetLastError());
}

void Buffer::fill_fp32(float low, float high) {
  fill<<<kBlocks, kThreads>>>(static_cast<float*>(data_), bytes_ / 4, low, high);
  require(cudaGetLastError());
}

std::vector<Times> time_in_turns(const std::vector<std::function<void()>>& launches, int repeats) {
  const Buffer cold(kFlushBytes);
  cudaEvent_t begin;
  cudaEvent_t end;
  require(cudaEventCreate(&begin));
  require(cudaEventCreate(&end));
  std::vector<std::vector<float>> runs(launches.size());
  for (int repeat = -1; repeat < repeats; ++repeat) {
    for (std::size_t i = 0; i < launches.size(); ++i) {
      require(cudaMemsetAsync(cold.data(), repeat & 0xff, kFlushBytes));
      require(cudaEventRecord(begin));
      launches[i]();
      require(cudaEventRecord(end));
      require(cudaEventSynchronize(end));
      float ms = 0;
      require(cudaEventElapsedTime(&ms, begin, end));
      if (repeat >= 0) runs[i].push_back(ms);
    }
  }
  require(cudaEventDestroy(begin));
  require(cudaEventDestroy(end));
  std::vector<Times> times;
  for (std::vector<float>& ms : runs) {
    std::sort(ms.begin(), ms.end());
    times.push_back({ms[ms.size() / 2], ms[ms.size() / 5], ms[ms.size() * 4 / 5]});
  }
  return times;
}

}  // namespace kda::bench
