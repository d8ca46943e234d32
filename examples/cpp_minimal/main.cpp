// One forward and one backward of Kimi Delta Attention on the CPU.
#include <cmath>
#include <cstdio>
#include <vector>

#include <kda/kda.h>

using kda::DType;
using kda::Operation;
using kda::TensorId;

// Memory for one tensor of the problem, with some numbers in it.
std::vector<float> tensor(const kda::Problem& problem, TensorId id, double low, double high) {
  std::vector<float> values(static_cast<size_t>(problem.bytes(id)) / sizeof(float));
  for (size_t i = 0; i < values.size(); ++i) {
    const double wave =
        0.5 + 0.5 * std::sin(0.7 * static_cast<double>(i) + static_cast<double>(id));
    values[i] = static_cast<float>(low + (high - low) * wave);
  }
  return values;
}

// Plans and runs; throws kda::Error with a line for people if something is wrong.
void run(const kda::Problem& problem, kda::Args args) {
  const kda::Plan plan = kda::make_plan(problem).value();
  std::vector<char> workspace(plan.workspace_bytes() + 64);
  const auto address = reinterpret_cast<size_t>(workspace.data());
  args.workspace = workspace.data() + (64 - address % 64);
  args.workspace_bytes = plan.workspace_bytes();
  if (kda::Status status = plan.run(args); !status.ok()) throw kda::Error(status);
}

int main() try {
  const kda::Sizes sizes{.B = 1, .T = 100, .H = 2, .HV = 2, .K = 32, .V = 16};
  auto forward = kda::Problem::make(Operation::kChunkForward, sizes, DType::kF32);
  forward.qk_l2norm = true;  // normalise q and k inside

  const auto q = tensor(forward, TensorId::kQ, -1, 1), k = tensor(forward, TensorId::kK, -1, 1);
  const auto v = tensor(forward, TensorId::kV, -1, 1), g = tensor(forward, TensorId::kG, -0.5, 0);
  const auto beta = tensor(forward, TensorId::kBeta, 0, 1);
  std::vector<float> o(v.size());
  kda::Args args;
  args.in(TensorId::kQ, q.data()).in(TensorId::kK, k.data()).in(TensorId::kV, v.data());
  args.in(TensorId::kG, g.data()).in(TensorId::kBeta, beta.data());
  run(forward, kda::Args(args).out(TensorId::kO, o.data()));
  std::printf("o: %.6f %.6f ... %.6f\n", o[0], o[1], o.back());

  // The gradient of the sum of o: its gradient is 1 everywhere.
  auto backward = kda::Problem::make(Operation::kChunkBackward, sizes, DType::kF32);
  backward.qk_l2norm = true;
  backward.set(TensorId::kDq, DType::kF32).set(TensorId::kDv, DType::kF32);
  const std::vector<float> ones(o.size(), 1.0f);
  std::vector<float> dq(q.size()), dv(v.size());
  args.in(TensorId::kDo, ones.data()).out(TensorId::kDq, dq.data()).out(TensorId::kDv, dv.data());
  run(backward, args);
  std::printf("dq: %.6f %.6f ... %.6f\n", dq[0], dq[1], dq.back());
  std::printf("dv: %.6f %.6f ... %.6f\n", dv[0], dv[1], dv.back());
} catch (const kda::Error& error) {
  std::fprintf(stderr, "cpp_minimal: %s\n", error.what());
  return 1;
}
