// Times of the state scan at the shapes of the training benchmarks, beside the time that its bytes
// take at the rate of a large copy. One JSON line each:
//
//   kda_state_scan_bench [REPEATS] [SHAPE | IMPLEMENTATION | dq_raw | no_dq_raw | no_copy]...
//
// Without words it times sm90_state_scan at all shapes, with dq_raw and without.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "kda/kda.h"
#include "timing.h"

namespace kda::bench {
namespace {

using enum TensorId;

struct Shape {
  const char* name;
  Sizes sizes;
};
constexpr Shape kShapes[] = {
    {"S1", {1, 8192, 96, 96, 128, 128, 0, 0}},
    {"S2", {16, 8192, 16, 16, 128, 256, 0, 0}},
    {"S3", {1, 4096, 16, 16, 128, 128, 0, 0}},
    {"S4", {2, 4096, 64, 64, 128, 128, 0, 0}},
};

/// Values for which the state stays of order 1: what leaves it in a chunk is a fraction of it.
void fill(Buffer& buffer, TensorId id) {
  if (id == kGamma) return buffer.fill_fp32(-2.f, 0.f);
  const float size = id == kW ? 0.05f : id == kKg ? 0.2f : 1.f;
  buffer.fill_bf16(-size, size);
}

double copy_gb_per_s(int repeats) {
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  Buffer from(kBytes);
  const Buffer to(kBytes);
  from.fill_bf16(-1.f, 1.f);
  const Times times = time_in_turns(
      {[&] { require(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice)); }},
      repeats)[0];
  return 2.0 * kBytes / times.median_ms * 1e-6;
}

Problem problem_of(const Sizes& sizes, bool raw_dq) {
  Problem problem = Problem::make(Operation::kStateScan, sizes, DType::kBF16);
  problem.set(kH, DType::kBF16).set(kVNew, DType::kBF16).set(kFinalState, DType::kF32);
  if (raw_dq) problem.set(kDo, DType::kBF16).set(kDqRaw, DType::kF32);
  return problem.validated().value();
}

/// Every tensor once; of gamma, a row a chunk.
double bytes_of(const Problem& problem) {
  double bytes = 0;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!problem.has(spec.id)) continue;
    const auto all = static_cast<double>(problem.bytes(spec.id));
    bytes += spec.id == kGamma ? all / problem.chunk_size : all;
  }
  return bytes;
}

void time_shape(const Shape& shape, bool raw_dq, const std::vector<std::string>& implementations,
                int repeats, double copy_rate) {
  const Problem problem = problem_of(shape.sizes, raw_dq);
  std::vector<std::unique_ptr<Buffer>> buffers;
  Args args;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!problem.has(spec.id)) continue;
    buffers.push_back(std::make_unique<Buffer>(static_cast<std::size_t>(problem.bytes(spec.id))));
    if (spec.role == Role::kInput) fill(*buffers.back(), spec.id);
    args.out(spec.id, buffers.back()->data());
  }
  std::vector<Plan> plans;
  std::size_t workspace_bytes = 1;
  for (const std::string& name : implementations) {
    Options options;
    options.implementation = name;
    plans.push_back(make_plan(problem, {DeviceType::kCuda, 0}, options).value());
    workspace_bytes = std::max(workspace_bytes, plans.back().workspace_bytes());
  }
  const Buffer workspace(workspace_bytes);
  args.workspace = workspace.data();
  args.workspace_bytes = workspace_bytes;
  std::vector<std::function<void()>> launches;
  for (const Plan& plan : plans) {
    launches.emplace_back([&plan, &args] {
      if (const Status status = plan.run(args); !status.ok()) throw Error(status);
    });
  }
  const std::vector<Times> times = time_in_turns(launches, repeats);
  const double bytes = bytes_of(problem);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    fmt::print(
        "{{\"shape\": \"{}\", \"dq_raw\": {}, \"impl\": \"{}\", \"median_ms\": {:.4f}, "
        "\"p20_ms\": {:.4f}, \"p80_ms\": {:.4f}, \"bytes\": {:.0f}, \"floor_ms\": {:.4f}, "
        "\"gb_per_s\": {:.0f}}}\n",
        shape.name, raw_dq, plans[i].implementation(), times[i].median_ms, times[i].p20_ms,
        times[i].p80_ms, bytes, bytes / copy_rate * 1e-6, bytes / times[i].median_ms * 1e-6);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace kda::bench

int main(int argc, char** argv) {
  using namespace kda::bench;
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 15;
  std::vector<Shape> shapes;
  std::vector<std::string> implementations;
  bool plain = true;
  bool raw_dq = true;
  bool copy = true;
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i];
    const auto* const known = std::find_if(std::begin(kShapes), std::end(kShapes),
                                           [&](const Shape& shape) { return word == shape.name; });
    if (known != std::end(kShapes)) {
      shapes.push_back(*known);
    } else if (word == "dq_raw") {
      plain = false;
    } else if (word == "no_dq_raw") {
      raw_dq = false;
    } else if (word == "no_copy") {
      copy = false;
    } else {
      implementations.push_back(word);
    }
  }
  if (shapes.empty()) shapes.assign(std::begin(kShapes), std::end(kShapes));
  if (implementations.empty()) implementations = {"sm90_state_scan"};
  const double copy_rate = copy ? copy_gb_per_s(repeats) : 4250;
  fmt::print("{{{}, \"copy_gb_per_s\": {:.0f}}}\n", run_header(argc, argv), copy_rate);
  for (const bool with_dq : {false, true}) {
    if (with_dq ? !raw_dq : !plain) continue;
    for (const Shape& shape : shapes) {
      time_shape(shape, with_dq, implementations, repeats, copy_rate);
    }
  }
  return 0;
}
