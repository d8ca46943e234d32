// rev_scan: the chunks of one sequence, value head and 64 or 128 columns of V from the last to the
// first; records and do -> dh / m, R / m and the gradient of the initial state.
//
// The scale is m 2^e; in bf16 e = 0 for common scales, else 1 <= |m| < 2. Everything is linear in
// (do, dfinal_state), so the walk multiplies do by 2^e, which is exact in bf16, starts from
// dfinal_state / m, and m comes back where the results are used. In fp16 the power of two moves
// with the walk (rev_unit.cuh), and each chunk and 64 columns leave m times their unit beside dh
// and R.
//
// Grid, warps, shared memory and barriers are those of scan.cuh. A consumer keeps D^T [64 v x K k]
// in fp32 accumulators. Per chunk, in the record's letters, do already times 2^e:
//   dh^T = D^T packed to 16 bits                   of the state that leaves the chunk
//   dv^T = dh^T kg^T + do^T P                      kg summed along its columns, P along its rows
//   R^T = dv^T + dv^T A1                           A1 = (I + L)^-1 - I; the first dv in fp32;
//                                                  stored under the next chunk's products
//   D^T = 2^G_end . D^T + do^T qe - (beta R)^T ke
#pragma once

#include "cuda/sm90/chunk_bwd/rev_unit.cuh"

namespace kda::cuda::sm90 {

template <class IoType, int HeadSize>
struct ReverseConsumer : ForwardConsumer<IoType, HeadSize, Walk::kReverse> {
  using Base = ForwardConsumer<IoType, HeadSize, Walk::kReverse>;
  using Io = IoType;
  using Base::Base;
  using Base::K;
  using Base::kState;
  static constexpr bool kHasUnit = __is_same(Io, __half);

  /// do^T of a chunk once it is there; in bf16 times 2^e.
  __device__ __forceinline__ void load_do(uint32_t (&x)[8], const StagePosition& position,
                                          int32_t chunk) const {
    this->load_tokens(x, position, chunk);
    if constexpr (!kHasUnit) {
      if (this->p.scale != 1) multiply(x, this->p.scale);
    }
  }

  static __device__ __forceinline__ void multiply(uint32_t (&x)[8], float factor) {
#pragma unroll
    for (uint32_t& pair : x) {
      const float2 value = unpack<Io>(pair);
      pair = pack<Io>(factor * value.x, factor * value.y);
    }
  }

  /// Moves the state to a unit that fits chunk c, and do to that unit.
  __device__ __forceinline__ void fit(float (&state)[kState], uint32_t (&grad_o)[8], float& unit,
                                      int32_t c) const {
    float most = 0;
#pragma unroll
    for (const uint32_t pair : grad_o) {
      const float2 value = unpack<Io>(pair);
      most = fmaxf(most, fmaxf(fabsf(value.x), fabsf(value.y)));
    }
    most *= this->p.scale / unit;
#pragma unroll
    for (const float x : state) most = fmaxf(most, fabsf(x));
    const float next = fitted_unit(unit, largest_of_group(*this, most, c % 2));
    if (next != unit) {
      const float factor = unit / next;
#pragma unroll
      for (float& x : state) x *= factor;
      unit = next;
    }
    multiply(grad_o, this->p.scale / unit);
    const int64_t row = 2 * int64_t{this->work.first_h + c / 2} + c % 2;
    if (this->thread != 0 || row >= 2 * this->p.h_row_count) return;  // wrong cu_seqlens
    this->p.units[(row * this->p.heads.HV + this->work.hv) * (this->p.heads.V / kGroupColumns) +
                  this->column() / kGroupColumns] = this->p.mantissa * unit;
  }

  /// grad_o: of chunk c, and afterwards of the one before; unit: that of the state.
  __device__ __forceinline__ void chunk(float (&state)[kState], uint32_t (&grad_o)[8], float& unit,
                                        int32_t c, const StagePosition& position,
                                        const StagePosition& next) const {
    const unsigned char* const record = this->memory.record(position.stage);
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(record));
    const PanelTile<2 * kChunk> ke{address + Record<K>::kRead};
    const PanelTile<2 * kChunk> qe{address + Record<K>::kRead + kChunk * kPanelRowBytes};
    const PanelTile<kChunk> kg{address + Record<K>::kUpdate};
    const SquareTile A1{address + Record<K>::kSolve};
    const SquareTile P{address + Record<K>::kScores};

    if constexpr (kHasUnit) fit(state, grad_o, unit, c);
    uint32_t dh[kState / 2];
    float X[16];
    this->multiply_packed(X, dh, state, kg);
    wgmma_rs<Io, Major::kOuter>(X, grad_o, P.rows(0), true);
    wgmma_rs<Io, Major::kOuter>(X, grad_o + 4, P.rows(1), true);
    wgmma_commit();
    Base::template older_products_are_over<1>();
    this->decay(state, record);
    wgmma_wait<0>();
    uint32_t dv[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) dv[i] = pack<Io>(X[2 * i], X[2 * i + 1]);
    wgmma_fence();
    wgmma_rs<Io, Major::kOuter>(X, dv, A1.rows(0), true);
    wgmma_rs<Io, Major::kOuter>(X, dv + 4, A1.rows(1), true);
    wgmma_commit();
    wgmma_rs<Io, Major::kOuter>(state, grad_o, qe.rows(0), true);
    wgmma_rs<Io, Major::kOuter>(state, grad_o + 4, qe.rows(1), true);
    wgmma_commit();
    // Asked under the products, for an answer takes as long.
    const Phase staging_free = this->o_free(c, 0);
    const bool is_staging_free = is_over(staging_free);
    wgmma_wait<1>();
    uint32_t R[8];
    uint32_t y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 beta = this->beta_of(record, i);
      R[i] = pack<Io>(X[2 * i], X[2 * i + 1]);
      y[i] = pack<Io>(beta.x * X[2 * i], beta.y * X[2 * i + 1]);
    }
    wgmma_fence();
    wgmma_rs<Io, Major::kOuter, -1>(state, y, ke.rows(0), true);
    wgmma_rs<Io, Major::kOuter, -1>(state, y + 4, ke.rows(1), true);
    wgmma_commit();
    if (!is_staging_free) wait_for(staging_free);
    this->store_o(R, c, 0);
    this->store_h(dh, c, 0);
    wgmma_wait<1>();  // that of qe has read grad_o
    if (c > 0) load_do(grad_o, next, c - 1);
    wgmma_wait<0>();
    this->release(position);
  }

  template <bool kTrusting>
  __device__ __forceinline__ void walk(float (&state)[kState], int32_t) const {
    this->load_state(state);
    // Without a chunk the gradient passes bit for bit.
    const float mantissa = this->work.chunks > 0 ? this->p.mantissa : 1;
    const float inverse = 1 / mantissa;
#pragma unroll
    for (int i = 0; i < kState; ++i) state[i] *= inverse;
    const int32_t last = this->work.chunks - 1;
    StagePosition position;
    uint32_t grad_o[8];
    float unit = 1;
    if (last >= 0) load_do(grad_o, position, last);
    for (int32_t c = last; c >= 0; --c) {
      StagePosition next = position;
      next.advance(this->memory.stages);
      chunk(state, grad_o, unit, c, position, next);
      position = next;
    }
#pragma unroll
    for (int i = 0; i < kState; ++i) state[i] *= mantissa * unit;
  }
};

}  // namespace kda::cuda::sm90
