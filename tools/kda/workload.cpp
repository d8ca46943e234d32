#include "workload.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "blocks.h"
#include "generate.h"

namespace kda::program {
namespace {

using cases::CaseSpec;
using cases::HostTensor;

DType accurate(DType io) { return io == DType::kF64 ? DType::kF64 : DType::kF32; }

/// Every optional output of the operation, saved tensors of the forward excepted.
void want_outputs(Problem& problem, DType io) {
  const bool forward = problem.operation == Operation::kChunkForward;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const bool saved =
        spec.id == TensorId::kH || spec.id == TensorId::kAqk || spec.id == TensorId::kA;
    if (spec.role != Role::kOutput || problem.has(spec.id) || (forward && saved)) continue;
    if (spec.id == TensorId::kDALog && !problem.has(TensorId::kALog)) continue;
    if (spec.id == TensorId::kDdtBias && !problem.has(TensorId::kDtBias)) continue;
    const bool follows_io = spec.dtypes == DTypeRule::kFloatIo || spec.id == TensorId::kDg ||
                            spec.id == TensorId::kDbeta;
    problem.set(spec.id, follows_io ? io : accurate(io));
  }
}

Problem whole_operation(Operation operation, const Sizes& sizes, const BenchOptions& options) {
  Problem problem = Problem::make(operation, sizes, options.io);
  problem.qk_l2norm = true;
  problem.beta_sigmoid = true;
  problem.gate = options.gate;
  problem.lower_bound = options.gate == Gate::kLowerBound ? -5 : 0;
  problem.set(TensorId::kG, options.io).set(TensorId::kBeta, options.io);
  if (sizes.N > 0) problem.set(TensorId::kCuSeqlens, DType::kI64);
  if (options.gate != Gate::kNone) {
    problem.set(TensorId::kALog, DType::kF32).set(TensorId::kDtBias, DType::kF32);
  }
  if (options.checkpoints) problem.set(TensorId::kH, options.io);
  want_outputs(problem, options.io);
  return problem;
}

/// A step of decoding, the state updated in place.
Workload decode(const Sizes& sizes, const BenchOptions& options, DType state, bool v_first) {
  Problem problem = whole_operation(Operation::kRecurrent, sizes, options);
  problem.state_v_first = v_first;
  problem.set(TensorId::kInitialState, state).set(TensorId::kFinalState, state);
  return {problem, true};
}

constexpr int64_t kSkipped = 8;  ///< of a pool's sequences one in so many, the last of each

/// The same with states in a pool, addressed by state_indices.
Workload decode_in_pool(const Sizes& sizes, const BenchOptions& options, DType state) {
  Workload workload = decode(sizes, options, state, false);
  workload.problem.sizes.P = sizes.B;
  workload.problem.set(TensorId::kStateIndices, DType::kI32);
  const int64_t skipped = sizes.B / kSkipped;
  workload.active = static_cast<double>(sizes.B - skipped) / static_cast<double>(sizes.B);
  return workload;
}

Problem stage(Operation operation, const Sizes& sizes, DType io) {
  Problem problem = Problem::make(operation, sizes, io);
  if (operation == Operation::kWu) problem.set(TensorId::kQ, io).set(TensorId::kV, io);
  if (operation == Operation::kIntraBackward) {
    for (const TensorId id : {TensorId::kDqPartial, TensorId::kDkPartial, TensorId::kDgPartial,
                              TensorId::kDbetaPartial}) {
      problem.set(id, accurate(io));
    }
  }
  want_outputs(problem, io);
  if (operation == Operation::kStateScan) problem.set(TensorId::kDqRaw, DType::kNone);
  if (operation == Operation::kIntraBackward) {
    problem.set(TensorId::kDg, accurate(io)).set(TensorId::kDbeta, accurate(io));
  }
  return problem;
}

bool decodes(Suite suite, const Sizes& sizes) {
  return suite == Suite::kDecode || (suite == Suite::kHost && sizes.T == 1);
}

/// The first token rows of a small tensor, repeated over B rows of T tokens.
HostTensor repeated(const HostTensor& small, int64_t B, int64_t T) {
  std::vector<int64_t> shape = small.shape;
  const int64_t tokens = shape[1];
  shape[0] = B;
  shape[1] = T;
  HostTensor result = HostTensor::uninitialised(small.dtype, shape);
  if (tokens == 0 || result.bytes.empty()) return result;
  const std::size_t row = small.bytes.size() / static_cast<std::size_t>(tokens);
  cases::in_blocks(B * T, small.count() / tokens, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(result.bytes.data() + static_cast<std::size_t>(i) * row,
                  small.bytes.data() + static_cast<std::size_t>(i % T % tokens) * row, row);
    }
  });
  return result;
}

}  // namespace

BenchShape packed_shape(Sizes sizes, std::vector<int64_t> lengths) {
  sizes.B = 1;
  sizes.T = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  sizes.N = static_cast<int64_t>(lengths.size());
  return {sizes, std::move(lengths)};
}

std::vector<BenchShape> shapes_of(Suite suite, DeviceType device) {
  const auto shape = [](int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V) {
    return BenchShape{{B, T, H, HV, K, V, 0, 0}, {}};
  };
  const bool cuda = device == DeviceType::kCuda;
  switch (suite) {
    case Suite::kPrefill:
      if (cuda) {
        const BenchShape long_one = shape(1, 8192, 96, 96, 128, 128);
        return {long_one, packed_shape(long_one.sizes, {1300, 547, 2048, 963, 271, 3063}),
                packed_shape(long_one.sizes, std::vector<int64_t>(8, 1024)),
                shape(8, 2048, 32, 32, 128, 128)};
      }
      return {shape(1, 2048, 8, 8, 128, 128), shape(4, 512, 4, 8, 128, 128)};
    case Suite::kDecode:
      if (cuda) {
        std::vector<BenchShape> shapes;
        for (const int64_t T : {1, 4, 8}) {
          for (const int64_t B : {1, 8, 32, 128, 256})
            shapes.push_back(shape(B, T, 32, 32, 128, 128));
        }
        shapes.push_back(shape(1024, 1, 32, 32, 128, 128));
        return shapes;
      }
      return {shape(1, 1, 32, 32, 128, 128), shape(32, 1, 32, 32, 128, 128)};
    case Suite::kHost:
      return {shape(1, 64, 4, 4, 128, 128), shape(1, 1, 4, 4, 128, 128)};
    case Suite::kStages:
      return {cuda ? shape(1, 8192, 96, 96, 128, 128) : shape(1, 4096, 4, 4, 128, 128)};
    default:
      break;
  }
  if (!cuda) {
    return {shape(1, 4096, 4, 4, 128, 128), shape(1, 4096, 8, 8, 64, 64),
            shape(1, 2048, 2, 4, 128, 256)};
  }
  return {shape(1, 8192, 96, 96, 128, 128), shape(16, 8192, 16, 16, 128, 256),
          shape(1, 4096, 16, 16, 128, 128), shape(2, 4096, 64, 64, 128, 128),
          shape(1, 131072, 32, 32, 128, 128)};
}

std::vector<Workload> workloads_of(Suite suite, const BenchShape& shape,
                                   const BenchOptions& options) {
  const Sizes& sizes = shape.sizes;
  std::vector<Workload> list;
  switch (decodes(suite, sizes) ? Suite::kDecode : suite) {
    case Suite::kDecode:
      for (const DType state : {DType::kF32, DType::kBF16}) {
        for (const bool v_first : {false, true}) {
          list.push_back(decode(sizes, options, state, v_first));
        }
        list.push_back(decode_in_pool(sizes, options, state));
      }
      break;
    case Suite::kStages:
      for (const Operation operation :
           {Operation::kGateCumsum, Operation::kIntra, Operation::kWu, Operation::kStateScan,
            Operation::kOutput, Operation::kReverseScan, Operation::kWyBackward,
            Operation::kIntraBackward}) {
        list.push_back({stage(operation, sizes, options.io), false});
      }
      break;
    case Suite::kPrefill:
      list.push_back({whole_operation(Operation::kChunkForward, sizes, options), false});
      break;
    default:
      list.push_back({whole_operation(Operation::kChunkForward, sizes, options), false});
      list.push_back({whole_operation(Operation::kChunkBackward, sizes, options), false});
      break;
  }
  return list;
}

cases::TensorMap inputs_of(Suite suite, const BenchShape& shape, const BenchOptions& options) {
  constexpr int64_t kTokens = 1024;
  const Sizes& sizes = shape.sizes;
  CaseSpec spec;
  spec.sizes = sizes;
  spec.sizes.B = 1;
  spec.sizes.N = 0;
  spec.sizes.T = std::min(sizes.T, kTokens);
  spec.io = options.io;
  spec.gate_dtype = suite == Suite::kStages ? accurate(options.io) : options.io;
  spec.gate = suite == Suite::kStages ? Gate::kNone : options.gate;
  spec.qk_l2norm = suite != Suite::kStages;
  spec.beta_sigmoid = suite != Suite::kStages;
  spec.initial_state = false;
  spec.dfinal_state = false;
  cases::Case small = cases::generate(spec);
  cases::TensorMap inputs;
  for (auto& [id, tensor] : small.inputs) {
    const bool has_tokens = tensor.shape.size() > 2;
    inputs[id] = has_tokens ? repeated(tensor, sizes.B, sizes.T) : std::move(tensor);
  }
  if (!shape.lengths.empty()) {
    HostTensor starts(DType::kI64, {sizes.N + 1});
    int64_t start = 0;
    for (int64_t i = 0; i < sizes.N; ++i) {
      start += shape.lengths[static_cast<std::size_t>(i)];
      starts.set(i + 1, static_cast<double>(start));
    }
    inputs[TensorId::kCuSeqlens] = std::move(starts);
  }
  return inputs;
}

HostTensor initial_state_of(const Problem& problem) {
  CaseSpec spec;
  spec.sizes = problem.sizes;
  spec.sizes.B = 1;
  spec.initial_state = true;
  spec.state_v_first = problem.state_v_first;
  const DType dtype = problem[TensorId::kInitialState].dtype;
  const cases::Case small = cases::generate(spec);
  const HostTensor one = cases::converted(*small.input(TensorId::kInitialState), dtype);
  std::vector<int64_t> shape = one.shape;
  shape[0] = problem.sizes.B;
  HostTensor all = HostTensor::uninitialised(dtype, shape);
  for (std::size_t at = 0; at < all.bytes.size(); at += one.bytes.size()) {
    std::memcpy(all.bytes.data() + at, one.bytes.data(), one.bytes.size());
  }
  return all;
}

HostTensor state_indices_of(const Problem& problem) {
  const int64_t B = problem.sizes.B;
  const int64_t half = (B + 1) / 2;
  HostTensor indices(DType::kI32, {B});
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = b % 2 == 0 ? b / 2 : half + b / 2;  // each slot once, from two ends
    indices.set(b, b % kSkipped == kSkipped - 1 ? -1 : static_cast<double>(slot));
  }
  return indices;
}

double flop_of(const Problem& problem) {
  const Sizes& s = problem.sizes;
  const auto K = static_cast<double>(s.K);
  const auto V = static_cast<double>(s.V);
  const auto C = static_cast<double>(problem.chunk_size);
  double each = 0;  // per token and value head
  switch (problem.operation) {
    case Operation::kChunkForward:
      each = 6 * K * V + 6 * C * K + 4 * C * V;
      break;
    case Operation::kChunkBackward:
      each = 16 * K * V + 14 * C * K + 10 * C * V + 4 * C * C;
      break;
    case Operation::kRecurrent:
      each = 7 * K * V;
      break;
    case Operation::kGateCumsum:
      each = K;
      break;
    case Operation::kIntra:
      each = 4 * C * K + C * C / 3;
      break;
    case Operation::kWu:
      each = 2 * C * (K + V);
      break;
    case Operation::kStateScan:
      each = 4 * K * V + (problem.has(TensorId::kDqRaw) ? 2 * K * V : 0);
      break;
    case Operation::kOutput:
      each = 2 * K * V + 2 * C * V;
      break;
    case Operation::kReverseScan:
      each = 6 * K * V + 2 * C * V;
      break;
    case Operation::kWyBackward:
      each = 6 * K * V + 6 * C * V + 4 * C * K + 4 * C * C;
      break;
    case Operation::kIntraBackward:
      each = 8 * C * K;
      break;
  }
  return each * static_cast<double>(s.B) * static_cast<double>(s.T) * static_cast<double>(s.HV);
}

double bytes_of(const Problem& problem) {
  // The scans read a row of gamma a chunk.
  const bool scans =
      problem.operation == Operation::kStateScan || problem.operation == Operation::kReverseScan;
  double bytes = 0;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const auto all = static_cast<double>(problem.bytes(spec.id));
    bytes += scans && spec.id == TensorId::kGamma ? all / problem.chunk_size : all;
  }
  return bytes;
}

}  // namespace kda::program
