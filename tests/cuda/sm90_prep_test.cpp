// prep by itself: its records and flags do not depend on how many blocks share the work. What the
// records hold is tested by the forward and the backward that read them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "kda/types.h"

namespace kda::cuda::sm90 {
namespace {

constexpr int64_t kB = 2;
constexpr int64_t kT = 97;  ///< three chunks and one token
constexpr int64_t kHV = 3;
constexpr int64_t kItems = kB * 4 * kHV;

struct Freed {
  void operator()(void* p) const { cudaFree(p); }
};
using Memory = std::unique_ptr<void, Freed>;

Memory filled(std::size_t bytes, int value) {
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, bytes), cudaSuccess);
  EXPECT_EQ(cudaMemset(p, value, bytes), cudaSuccess);
  return Memory(p);
}

template <class T>
std::vector<T> values_of(const Memory& memory, std::size_t count) {
  std::vector<T> values(count);
  EXPECT_EQ(cudaMemcpy(values.data(), memory.get(), count * sizeof(T), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return values;
}

uint16_t bits_of(float x, DType dtype) {
  if (dtype == DType::kBF16) return __bfloat16_as_ushort(__float2bfloat16(x));
  return __half_as_ushort(__float2half(x));
}

/// Random inputs on the device. Gates reach down to where some rows are far.
struct PrepCase {
  std::vector<Memory> memory;
  PrepParams params;

  PrepCase(int32_t K, DType dtype) {
    params.q = input(K, dtype, 1);
    params.k = input(K, dtype, 1);
    params.gate.g = input(K, dtype, 20);
    params.beta = input(1, dtype, 1);
    params.sequences.count = kB;
    params.sequences.T = kT;
    params.sequences.C = kChunk;
    params.sequences.chunks_per_row = 4;
    params.sequences.chunk_rows = kB * 4;
    params.heads.H = params.heads.HV = kHV;
    params.heads.K = K;
    params.heads.V = 64;
    params.qk_l2norm = true;
    params.beta_sigmoid = true;
  }

  /// Normal numbers, for gates (size > 1) the negative of their squares.
  Tensor input(int64_t columns, DType dtype, float size) {
    std::mt19937 random(static_cast<unsigned>(memory.size()));
    std::normal_distribution<float> normal;
    std::vector<uint16_t> bits(static_cast<std::size_t>(kB * kT * kHV * columns));
    for (uint16_t& b : bits) {
      const float x = normal(random);
      b = bits_of(size > 1 ? -size * x * x : x, dtype);
    }
    memory.push_back(filled(bits.size() * sizeof(uint16_t), 0));
    EXPECT_EQ(cudaMemcpy(memory.back().get(), bits.data(), bits.size() * sizeof(uint16_t),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    return {memory.back().get(),
            {kT * kHV * columns, kHV * columns, columns, 1},
            static_cast<int32_t>(dtype)};
  }

  /// By `blocks` without flags, or by those of `room`.
  std::vector<unsigned char> records(int32_t blocks, const PrepRoom& room = {},
                                     uint32_t* ready = nullptr) {
    const auto bytes = static_cast<std::size_t>(
        kItems * (params.heads.K == 64 ? Record<64>::kBytes : Record<128>::kBytes));
    const Memory to = filled(bytes, 0);
    params.records = static_cast<std::byte*>(to.get());
    params.blocks = blocks;
    params.room = room;
    params.ready = ready;
    EXPECT_TRUE(launch_prep(params, false, nullptr).ok());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return values_of<unsigned char>(to, bytes);
  }
};

TEST(Sm90Prep, RecordsAndFlagsDoNotDependOnTheGrid) {
  KDA_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int32_t K : {64, 128}) {
      SCOPED_TRACE(K);
      PrepCase c(K, dtype);
      const std::vector<unsigned char> one_an_item = c.records(0);
      for (const int32_t blocks : {1, 5, 16}) EXPECT_EQ(c.records(blocks), one_an_item) << blocks;
      // Of the third every block wants to leave and one has to stay; the last leaves some SMs.
      for (const PrepRoom& room : {PrepRoom{1, 0, 0}, PrepRoom{16, 0, 0}, PrepRoom{16, 256, 15},
                                   PrepRoom{660, 40, 200, 92}}) {
        const Memory ready = filled((kItems + kPrepCounters) * sizeof(uint32_t), 0xff);
        EXPECT_EQ(c.records(0, room, static_cast<uint32_t*>(ready.get())), one_an_item)
            << room.blocks;
        EXPECT_EQ(values_of<uint32_t>(ready, kItems), std::vector<uint32_t>(kItems, 1))
            << room.blocks;
      }
    }
  }
}

}  // namespace
}  // namespace kda::cuda::sm90
