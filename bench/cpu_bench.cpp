// Times of the CPU backend, beside the rate of sgemm on the same machine.
//
//   kda_cpu_bench --benchmark_out=bench/results/cpu_NAME.json --benchmark_out_format=json
//
// cpu_time is that of all threads together and holds on a busy machine too. FLOP are those of
// the cost model of docs/cpu.md (K = V = 128: 180 k a token and head forward, 410 k backward), so
// that rates of all rows compare.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#ifdef KDA_BENCH_OPENBLAS
#include <cblas.h>
#endif

#include "kda/kda.h"

namespace {

using kda::DType;
using kda::Operation;
using kda::Problem;
using kda::Role;
using kda::Sizes;
using kda::TensorId;
using kda::TensorSpec;

constexpr Sizes kTrain{1, 4096, 4, 4, 128, 128};
constexpr Sizes kShort{1, 512, 2, 2, 128, 128};
constexpr Sizes kDecode{32, 1, 16, 16, 128, 128};

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};
using Memory = std::unique_ptr<std::byte[], AlignedDelete>;

Memory allocate(std::size_t bytes) {
  return Memory(static_cast<std::byte*>(::operator new[](bytes + 64, std::align_val_t{64})));
}

/// A problem with memory behind it and ordinary values in fp32 tensors.
class Bench {
 public:
  Bench(Operation operation, const Sizes& sizes, const std::string& family, float decay = 1)
      : decay_(decay) {
    Problem problem = Problem::make(operation, sizes, DType::kF32);
    for (const TensorSpec& spec : kda::tensors_of(operation)) {
      // Parameter gradients and states aside, everything takes part.
      const bool tokens = spec.shape.starts_with("[B,T,");
      if (tokens || spec.required) problem.set(spec.id, DType::kF32);
    }
    if (operation == Operation::kChunkForward || operation == Operation::kChunkBackward) {
      problem.set(TensorId::kAqk, DType::kNone).set(TensorId::kA, DType::kNone);
    }
    if (operation == Operation::kStateScan) {
      problem.set(TensorId::kDqRaw, DType::kNone).set(TensorId::kDo, DType::kNone);
      problem.set(TensorId::kH, DType::kF32);
    }
    if (operation == Operation::kReverseScan) problem.set(TensorId::kDh, DType::kF32);
    if (operation == Operation::kRecurrent) {
      problem.set(TensorId::kInitialState, DType::kF32).set(TensorId::kFinalState, DType::kF32);
    }
    plan_ = std::make_unique<kda::Plan>(kda::make_plan(problem, {}, {family, 0}).value());
    fill();
  }

  void run() {
    const kda::Status status = plan_->run(args_);
    if (!status.ok()) throw kda::Error(status);
  }
  const Problem& problem() const { return plan_->problem(); }

 private:
  void fill() {
    std::mt19937_64 random(1);
    for (const TensorSpec& spec : kda::tensors_of(problem().operation)) {
      if (!problem().has(spec.id)) continue;
      const auto bytes = static_cast<std::size_t>(problem().bytes(spec.id));
      memory_.push_back(allocate(bytes));
      std::memset(memory_.back().get(), 0, bytes);
      args_.out(spec.id, memory_.back().get());
      if (spec.role == Role::kInput) fill_input(spec.id, bytes / sizeof(float), random);
    }
    memory_.push_back(allocate(plan_->workspace_bytes()));
    args_.workspace = memory_.back().get();
    args_.workspace_bytes = plan_->workspace_bytes();
  }

  void fill_input(TensorId id, std::size_t count, std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(0, 1);
    auto* values = static_cast<float*>(args_[id]);
    const float key = 1 / std::sqrt(static_cast<float>(problem().sizes.K));
    for (std::size_t i = 0; i < count; ++i) {
      const bool keys = id == TensorId::kQ || id == TensorId::kK || id == TensorId::kKg ||
                        id == TensorId::kQg || id == TensorId::kW;
      if (keys) {
        values[i] = key * normal(random);
      } else if (id == TensorId::kG || id == TensorId::kGamma) {
        values[i] = -decay_ * uniform(random);
      } else if (id == TensorId::kBeta) {
        values[i] = uniform(random);
      } else if (id == TensorId::kA || id == TensorId::kAqk || id == TensorId::kDL) {
        values[i] = 0.01f * normal(random);
      } else {
        values[i] = normal(random);
      }
    }
  }

  float decay_;  ///< g is uniform in [-decay, 0]
  std::unique_ptr<kda::Plan> plan_;
  kda::Args args_;
  std::vector<Memory> memory_;
};

/// FLOP a token and value head: the cost model of docs/cpu.md.
double flops(const Problem& problem) {
  const auto K = static_cast<double>(problem.sizes.K);
  const auto V = static_cast<double>(problem.sizes.V);
  const auto C = static_cast<double>(problem.chunk_size);
  switch (problem.operation) {
    case Operation::kChunkForward:
      return 6 * K * V + 6 * C * K + 4 * C * V;
    case Operation::kChunkBackward:
      return 16 * K * V + 8 * C * K + 10 * C * V;
    case Operation::kRecurrent:
      return 7 * K * V;
    case Operation::kGateCumsum:
      return 0;
    case Operation::kIntra:
      return 4 * C * K + C * C / 3;
    case Operation::kWu:
      return 2 * C * (K + V);
    case Operation::kStateScan:
      return 4 * K * V;
    case Operation::kOutput:
      return 2 * K * V + 2 * C * V;
    case Operation::kReverseScan:
      return 6 * K * V + 2 * C * V;
    case Operation::kWyBackward:
      return 6 * K * V + 6 * C * V;
    case Operation::kIntraBackward:
      return 8 * C * K;
  }
  return 0;
}

double token_heads(const Sizes& sizes) { return static_cast<double>(sizes.B * sizes.T * sizes.HV); }

void report(benchmark::State& state, double flop, double tokens) {
  using Counter = benchmark::Counter;
  state.counters["FLOP/s"] = Counter(flop, Counter::kIsIterationInvariantRate);
  state.counters["token_heads/s"] = Counter(tokens, Counter::kIsIterationInvariantRate);
}

void one(benchmark::State& state, Operation operation, Sizes sizes, const std::string& family) {
  Bench bench(operation, sizes, family);
  bench.run();
  for (auto _ : state) bench.run();
  report(state, flops(bench.problem()) * token_heads(sizes), token_heads(sizes));
  if (operation == Operation::kRecurrent) {
    const double bytes = 8.0 * static_cast<double>(sizes.B * sizes.HV * sizes.K * sizes.V);
    state.counters["state_bytes/s"] =
        benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
  }
}

void both(benchmark::State& state, Sizes sizes, const std::string& family, float decay) {
  Bench forward(Operation::kChunkForward, sizes, family, decay);
  Bench backward(Operation::kChunkBackward, sizes, family, decay);
  const auto run = [&] {
    forward.run();
    backward.run();
  };
  run();
  for (auto _ : state) run();
  const double flop = flops(forward.problem()) + flops(backward.problem());
  report(state, flop * token_heads(sizes), token_heads(sizes));
}

#ifdef KDA_BENCH_OPENBLAS
void sgemm(benchmark::State& state) {
  const auto n = static_cast<int>(state.range(0));
  const auto count = static_cast<std::size_t>(n) * static_cast<std::size_t>(n);
  std::vector<float> a(count, 0.5f), b(count, 0.25f), c(count);
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1, a.data(), n, b.data(), n, 0,
                c.data(), n);
    benchmark::DoNotOptimize(c.data());
  }
  report(state, 2.0 * n * static_cast<double>(count), 0);
}
#endif

template <class... Arguments>
benchmark::internal::Benchmark* add(const std::string& name, Arguments&&... arguments) {
  return benchmark::RegisterBenchmark(name.c_str(), std::forward<Arguments>(arguments)...)
      ->MeasureProcessCPUTime()
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

std::string shape_of(const Sizes& s) {
  std::string text;
  for (const auto& [letter, value] : {std::pair{"B", s.B}, std::pair{"T", s.T}, std::pair{"H", s.H},
                                      std::pair{"K", s.K}, std::pair{"V", s.V}}) {
    text += letter + std::to_string(value);
  }
  return text;
}

void register_all() {
#ifdef KDA_BENCH_OPENBLAS
  for (const int n : {512, 1024, 2048}) add("sgemm", sgemm)->Arg(n);
#endif
  const std::string train = "/" + shape_of(kTrain);
  add("cpu_chunk_fwd" + train, one, Operation::kChunkForward, kTrain, "cpu");
  add("cpu_chunk_bwd" + train, one, Operation::kChunkBackward, kTrain, "cpu");
  add("cpu_chunk_fwd_bwd" + train, both, kTrain, "cpu", 1.0f);
  // Products of strong decays underflow: this must cost no time.
  add("cpu_chunk_fwd_bwd_strong_decay" + train, both, kTrain, "cpu", 20.0f);
  add("cpu_chunk_fwd_bwd/" + shape_of(kShort), both, kShort, "cpu", 1.0f);
  add("reference_chunk_fwd_bwd/" + shape_of(kShort), both, kShort, "reference", 1.0f);
  add("cpu_recurrent/" + shape_of(kDecode), one, Operation::kRecurrent, kDecode, "cpu");
  add("cpu_recurrent/" + shape_of(kShort), one, Operation::kRecurrent, kShort, "cpu");
  for (const Operation stage : {Operation::kGateCumsum, Operation::kIntra, Operation::kWu,
                                Operation::kStateScan, Operation::kOutput, Operation::kReverseScan,
                                Operation::kWyBackward, Operation::kIntraBackward}) {
    add("cpu_" + std::string(kda::name_of(stage)) + train, one, stage, kTrain, "cpu");
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) {
    const std::string part = argv[i];
    const std::size_t slash = i == 0 ? part.rfind('/') : std::string::npos;
    command += (i == 0 ? "" : " ") + (slash == std::string::npos ? part : part.substr(slash + 1));
  }
  benchmark::AddCustomContext("command", command);
  const kda::DeviceInfo cpu = kda::devices().front();
  benchmark::AddCustomContext("cpu", cpu.name + "; " + cpu.features);
  benchmark::AddCustomContext("kda", kda::version());
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
