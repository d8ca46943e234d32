// recurrent_any: every head size, stride and dtype. A K x columns tile of the state in shared
// memory, one column a thread and every (threads / columns)-th row.
#include "cuda/launch.h"
#include "cuda/recurrent/tokens.cuh"
#include "cuda/tile/shared_memory.cuh"

namespace kda::cuda {
namespace {

constexpr int kMaxK = 256;

template <class Real>
struct AnyShared {
  static constexpr int kColumns = kAnyColumns<Real>;
  static constexpr int kGroups = kAnyThreads / kColumns;
  Token<Real, kMaxK, kColumns> tokens[kTokenBlock];
  Real sums[2][kGroups][2][kColumns];
  Real state[kMaxK][kColumns];
};

template <class Real>
__device__ void step(AnyShared<Real>& shared, const RecurrentParams& p, const RecurrentTile& tile,
                     int64_t token, int slot) {
  using Shared = AnyShared<Real>;
  const int column = static_cast<int>(threadIdx.x) % Shared::kColumns;
  const int group = static_cast<int>(threadIdx.x) / Shared::kColumns;
  Real error = 0;
  Real out = 0;
  for (int k = group; k < p.heads.K; k += Shared::kGroups) {
    Real& s = shared.state[k][column];
    s = fma(s, shared.tokens[slot].decay[k], s * shared.tokens[slot].rest[k]);
    error += s * shared.tokens[slot].k[k];
    out += s * shared.tokens[slot].q[k];
  }
  auto& sums = shared.sums[slot % 2];
  sums[group][0][column] = error;
  sums[group][1][column] = out;
  __syncthreads();
  error = 0;
  out = 0;
  for (int g = 0; g < Shared::kGroups; ++g) {
    error += sums[g][0][column];
    out += sums[g][1][column];
  }
  const Real rk = shared.tokens[slot].rk;
  const Real u = shared.tokens[slot].beta * (shared.tokens[slot].v[column] - rk * error);
  for (int k = group; k < p.heads.K; k += Shared::kGroups) {
    shared.state[k][column] += shared.tokens[slot].k[k] * (rk * u);
  }
  if (group == 0 && tile.v0 + column < p.heads.V) {
    store<Real>(p.o,
                token_offset(p.o, tile.tokens.batch, tile.tokens.begin + token, tile.hv) +
                    (tile.v0 + column) * p.o.stride[3],
                shared.tokens[slot].rq * out + shared.tokens[slot].qk * u);
  }
}

template <class Real>
__global__ void __launch_bounds__(kAnyThreads)
    recurrent_any(const __grid_constant__ RecurrentParams p) {
  using Shared = AnyShared<Real>;
  Shared& shared = *shared_memory<Shared>();
  const int column = static_cast<int>(threadIdx.x) % Shared::kColumns;
  const int group = static_cast<int>(threadIdx.x) / Shared::kColumns;
  const int64_t tiles = recurrent_tiles(p, Shared::kColumns);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const RecurrentTile tile = recurrent_tile(p, index, Shared::kColumns);
    write_zeros<Real>(p, tile, Shared::kColumns);
    if (tile.slot < 0) continue;
    const auto offset = [&](const Tensor& t, int k) {
      return tile.slot * t.stride[0] + tile.hv * t.stride[1] + k * t.stride[2] +
             (tile.v0 + column) * t.stride[3];
    };
    const bool inside = tile.v0 + column < p.heads.V;
    for (int k = group; k < p.heads.K; k += Shared::kGroups) {
      shared.state[k][column] = p.initial_state.data && inside
                                    ? load<Real>(p.initial_state, offset(p.initial_state, k))
                                    : Real(0);
    }
    const int64_t length = tile.count;
    for (int64_t first = 0; first < length; first += kTokenBlock) {
      const int count = token_count(length, first, kTokenBlock);
      __syncthreads();
      load_block<Real>(shared.tokens, p, tile, first, count);
      for (int slot = 0; slot < count; ++slot) step(shared, p, tile, first + slot, slot);
    }
    if (p.final_state.data && inside) {
      for (int k = group; k < p.heads.K; k += Shared::kGroups) {
        store<Real>(p.final_state, offset(p.final_state, k), shared.state[k][column]);
      }
    }
    __syncthreads();
  }
}

template <class Real>
Status launch_for(const RecurrentParams& p, cudaStream_t stream) {
  const int64_t v_tiles = (p.heads.V + kAnyColumns<Real> - 1) / kAnyColumns<Real>;
  const int64_t sequences = p.sequences.count + (p.sequences.cu.data ? 1 : 0);
  return launch(
      {"recurrent_any", sequences * p.heads.HV * v_tiles, kAnyThreads, sizeof(AnyShared<Real>)},
      recurrent_any<Real>, p, stream);
}

}  // namespace

Status launch_recurrent_any(const RecurrentParams& p, bool fp64, cudaStream_t stream) {
  return fp64 ? launch_for<double>(p, stream) : launch_for<float>(p, stream);
}

}  // namespace kda::cuda
