// The contract of the library on a GPU: graphs, streams, threads, wrong arguments, wrong values.
#include <cmath>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "generate.h"
#include "kda/backend.h"
#include "support/calls.h"

namespace kda::test {
namespace {

HostTensor starts(std::initializer_list<int64_t> values) {
  HostTensor cu(DType::kI64, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), reinterpret_cast<int64_t*>(cu.bytes.data()));
  return cu;
}

// The sequences are read by the kernels, so a captured graph follows them. Capture in global mode
// fails on any synchronisation, allocation or copy to the host.
TEST_P(CudaReports, GRAPH_04_GRAPH_07_VARLEN_06_GraphFollowsOtherSequences) {
  const Case c = cases::generate(fitted_to_decode(packed_spec({0, 65, 65, 193, 300})));
  for (const Problem& problem : problems_of(c)) {
    attempt([&] {
      DeviceCase device = on_device(problem, c.inputs);
      const Stream stream;
      Graph graph(device.plan(), device.args(), stream);
      for (const HostTensor& cu : {starts({0, 1, 2, 250, 300}), starts({0, 100, 100, 100, 100}),
                                   starts({0, 0, 0, 0, 0}), c.inputs.at(kCuSeqlens)}) {
        device[kCuSeqlens].load(cu);
        device.poison_outputs();
        graph.launch(stream);
        const TensorMap replayed = device.outputs();
        device.poison_outputs();
        device.run(stream);
        expect_same_bits(replayed, device.outputs());
      }
    });
  }
}

// Values that no host check sees must not lead out of bounds; the next call is right.
TEST_P(CudaReports, VARLEN_12_WrongSequencesStayInBounds) {
  const Case c = cases::generate(fitted_to_decode(packed_spec({0, 65, 65, 193, 300})));
  constexpr int64_t kHuge = int64_t{1} << 60;
  for (const Problem& problem : problems_of(c)) {
    attempt([&] {
      DeviceCase device = on_device(problem, c.inputs);
      device.run();
      const TensorMap right = device.outputs();
      for (const HostTensor& cu :
           {starts({0, -5, 1000, 3, 2000}), starts({0, 300, 0, 300, 0}),
            starts({-7, kHuge, -kHuge, 5, 1}), starts({300, 299, 298, 297, 296})}) {
        device[kCuSeqlens].load(cu);
        device.run();
      }
      device[kCuSeqlens].load(c.inputs.at(kCuSeqlens));
      device.poison_outputs();
      device.run();
      expect_same_bits(right, device.outputs());
    });
  }
}

/// Four sequences, for four slots of a pool.
CaseSpec pool_spec() {
  CaseSpec spec;
  spec.sizes = {4, 3, 2, 2, 64, 64, 0, 0};
  spec.gradients = false;
  return spec;
}

struct PoolResult {
  HostTensor o;
  HostTensor pool;  ///< updated in place
};

/// Runs `c` with its initial states as the pool, sequence i on slot slots[i].
PoolResult run_on_pool(const Case& c, const std::vector<double>& slots, const Options& options) {
  Problem problem = recurrent_problem(c);
  problem.sizes.P = 4;
  problem.set(kStateIndices, DType::kI32);
  TensorMap inputs = c.inputs;
  inputs[kStateIndices] = cases::from_doubles(DType::kI32, {4}, slots);
  DeviceCase device(problem, inputs, 0, options);
  Args args = device.args();
  args.out(kFinalState, device[kInitialState].address());
  if (const Status status = device.plan().run(args); !status.ok()) throw Error(status);
  count_call(device.plan().implementation());
  require(cudaDeviceSynchronize());
  const HostTensor& before = c.inputs.at(kInitialState);
  return {device.outputs().at(kO), device[kInitialState].store(before.dtype, before.shape)};
}

// No index leads outside the pool.
TEST_P(CudaReports, PAGED_01_PAGED_02_PAGED_03_IndicesOutsideThePoolAreSkipped) {
  const Case c = cases::generate(fitted_to_decode(pool_spec()));
  const auto [o, pool] = run_on_pool(c, {-1, 4, 2, -2000000000}, options());
  const HostTensor& before = c.inputs.at(kInitialState);
  const int64_t row = o.count() / 4;
  const int64_t slot = pool.count() / 4;
  for (int64_t i = 0; i < o.count(); ++i) EXPECT_EQ(o.get(i) == 0, i / row != 2) << i;
  for (int64_t i = 0; i < pool.count(); ++i) {
    EXPECT_EQ(pool.get(i) == before.get(i), i / slot != 2) << "slot " << i / slot;
  }
}

// PAGED-02: what becomes of a slot that two sequences write is not defined; others are as ever.
TEST_P(CudaReports, PAGED_02_ASlotNamedTwiceEndangersNoOther) {
  const Case c = cases::generate(fitted_to_decode(pool_spec()));
  const PoolResult apart = run_on_pool(c, {0, -1, 3, -1}, options());
  const PoolResult twice = run_on_pool(c, {0, 0, 3, 0}, options());
  EXPECT_EQ(row_of(twice.o, 2).bytes, row_of(apart.o, 2).bytes);
  for (const int64_t slot : {1, 2, 3}) {
    EXPECT_EQ(row_of(twice.pool, slot).bytes, row_of(apart.pool, slot).bytes) << "slot " << slot;
  }
}

// Many sequences make the scans take wider blocks.
TEST(CudaContract, RowsOfALargeBatchHaveTheBitsOfRowsAlone) {
  KDA_NEEDS_GPU();
  for (const int64_t K : {40, 128}) {
    CaseSpec spec = packed_spec({});
    spec.cu_seqlens = {};
    spec.sizes = {66, 70, 1, 2, K, 100, 0, 0};
    const Case c = cases::generate(spec);
    for (const Operation operation : {Operation::kChunkForward, Operation::kChunkBackward}) {
      const auto problem_for = [&](const Case& of) {
        return operation == Operation::kChunkForward ? forward_problem(of) : backward_problem(of);
      };
      DeviceCase all(problem_for(c), c.inputs);
      all.run();
      const TensorMap together = all.outputs();
      for (const int64_t row : {0, 65}) {
        Case alone = c;
        alone.forward.sizes.B = 1;
        for (auto& [id, tensor] : alone.inputs) {
          if (id != kALog && id != kDtBias) tensor = row_of(tensor, row);
        }
        alone.forward = forward_problem(alone);
        DeviceCase one(problem_for(alone), alone.inputs);
        one.run();
        for (const auto& [id, tensor] : one.outputs()) {
          if (id == kDALog || id == kDdtBias) continue;  // sums over the batch
          EXPECT_EQ(row_of(together.at(id), row).bytes, tensor.bytes) << name_of(id) << " " << row;
        }
      }
    }
  }
}

TEST(CudaContract, ThreadsShareAPlan) {
  KDA_NEEDS_GPU();
  const Case c = cases::generate(packed_spec({0, 65, 65, 193, 300}));
  DeviceCase expected(backward_problem(c), c.inputs);
  expected.run();
  std::vector<TensorMap> results(4);
  std::vector<std::thread> threads;
  for (TensorMap& result : results) {
    threads.emplace_back([&] {
      DeviceCase own(backward_problem(c), c.inputs);
      const Stream stream;
      for (int i = 0; i < 10; ++i) {
        if (!expected.plan().run(own.args(), stream).ok()) return;
      }
      if (cudaStreamSynchronize(stream) == cudaSuccess) result = own.outputs();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const TensorMap& result : results) expect_same_bits(expected.outputs(), result);
}

TEST_P(CudaReports, DEV_01_WrongDeviceOrMemoryIsNamed) {
  const Case c = cases::generate(fitted(packed_spec({0, 300})));
  const Problem problem = forward_problem(c);
  const Status status = supports(problem, {DeviceType::kCuda, 99}, options());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("99"), std::string::npos) << status.message();

  DeviceCase device = on_device(problem, c.inputs);
  device.run();
  Args args = device.args();
  args.in(kQ, c.inputs.at(kQ).bytes.data());
  int pageable = 0;
  require(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
  if (pageable == 0) {
    const Status host = device.plan().run(args);
    EXPECT_EQ(host.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(host.message().rfind("q: ", 0), 0U) << host.message();
  }
}

TEST(CudaContract, TheCurrentDeviceStays) {
  KDA_NEEDS_GPU();
  int before = -1;
  require(cudaGetDevice(&before));
  const Case c = cases::generate(packed_spec({0, 300}));
  DeviceCase device(forward_problem(c), c.inputs);
  device.run();
  int after = -1;
  require(cudaGetDevice(&after));
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace kda::test
