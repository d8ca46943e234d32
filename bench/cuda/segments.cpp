// Times of sm90_chunk_fwd with its sequences cut into segments of several lengths; 0: not cut. One
// JSON line each:
//
//   kda_segments_bench [REPEATS] [B,T,HV,K,V | SEGMENT]...
//
// The lengths of a shape are timed in turns. Without words: shapes of few and of many heads.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cuda/generic/pipeline.h"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "kda/kda.h"
#include "timing.h"

namespace kda::bench {
namespace {

using enum TensorId;

constexpr std::array kAllSegments = {0, 512, 1024, 2048, 4096};

template <int32_t kSegment>
void forward(cuda::Pipeline& run) {
  cuda::sm90::forward_in_segments(run, kSegment);
}

cuda::PipelineFunction forward_of(int segment) {
  switch (segment) {
    case 512:
      return forward<512>;
    case 1024:
      return forward<1024>;
    case 2048:
      return forward<2048>;
    case 4096:
      return forward<4096>;
    default:
      return forward<0>;
  }
}

Problem problem_of(const Sizes& sizes) {
  Problem problem = Problem::make(Operation::kChunkForward, sizes, DType::kBF16);
  problem.set(kG, DType::kBF16).set(kBeta, DType::kBF16).set(kALog, DType::kF32);
  problem.set(kFinalState, DType::kF32);
  problem.gate = Gate::kSoftplus;
  problem.qk_l2norm = problem.beta_sigmoid = true;
  return problem.validated().value();
}

void time_shape(const Sizes& sizes, const std::vector<int>& segments, int repeats) {
  const Problem problem = problem_of(sizes);
  std::vector<std::unique_ptr<Buffer>> buffers;
  Args args;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!problem.has(spec.id)) continue;
    buffers.push_back(std::make_unique<Buffer>(static_cast<std::size_t>(problem.bytes(spec.id))));
    Buffer& buffer = *buffers.back();
    if (spec.role == Role::kInput && spec.id != kALog) buffer.fill_bf16(-2.f, 2.f);
    if (spec.id == kALog) buffer.fill_fp32(-1.f, 1.f);
    args.out(spec.id, buffer.data());
  }
  const Device device{DeviceType::kCuda, 0};
  std::vector<std::unique_ptr<Executor>> executors;
  for (const int segment : segments) {
    executors.push_back(cuda::make_pipeline(problem, device, forward_of(segment)).value());
    args.workspace_bytes = std::max(args.workspace_bytes, executors.back()->workspace_bytes());
  }
  const Buffer workspace(args.workspace_bytes);
  args.workspace = workspace.data();
  std::vector<std::function<void()>> launches;
  for (const auto& executor : executors) {
    launches.emplace_back([&executor, &args] {
      if (const Status status = executor->run(args, nullptr); !status.ok()) throw Error(status);
    });
  }
  const std::vector<Times> times = time_in_turns(launches, repeats);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    fmt::print(
        "{{\"shape\": [{}, {}, {}, {}, {}], \"segment\": {}, \"median_ms\": {:.4f}, \"p20_ms\": "
        "{:.4f}, \"p80_ms\": {:.4f}, \"workspace_bytes\": {}}}\n",
        sizes.B, sizes.T, sizes.HV, sizes.K, sizes.V, segments[i], times[i].median_ms,
        times[i].p20_ms, times[i].p80_ms, executors[i]->workspace_bytes());
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace kda::bench

int main(int argc, char** argv) {
  using namespace kda::bench;
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 15;
  std::vector<kda::Sizes> shapes;
  std::vector<int> segments;
  for (int i = 2; i < argc; ++i) {
    std::array<long, 5> x{};
    if (std::sscanf(argv[i], "%ld,%ld,%ld,%ld,%ld", &x[0], &x[1], &x[2], &x[3], &x[4]) == 5) {
      shapes.push_back({x[0], x[1], x[2], x[2], x[3], x[4], 0, 0});
    } else {
      segments.push_back(std::atoi(argv[i]));
    }
  }
  if (shapes.empty()) {
    shapes = {{1, 4096, 16, 16, 128, 128, 0, 0},   {1, 131072, 32, 32, 128, 128, 0, 0},
              {1, 131072, 8, 8, 128, 128, 0, 0},   {1, 32768, 4, 4, 128, 128, 0, 0},
              {1, 131072, 1, 1, 128, 128, 0, 0},   {1, 8192, 4, 4, 128, 128, 0, 0},
              {1, 131072, 16, 16, 128, 128, 0, 0}, {4, 4096, 16, 16, 128, 128, 0, 0},
              {16, 4096, 4, 4, 128, 128, 0, 0},    {32, 4096, 8, 8, 128, 128, 0, 0}};
  }
  if (segments.empty()) segments.assign(kAllSegments.begin(), kAllSegments.end());
  fmt::print("{{{}}}\n", run_header(argc, argv));
  for (const kda::Sizes& shape : shapes) time_shape(shape, segments, repeats);
  return 0;
}
