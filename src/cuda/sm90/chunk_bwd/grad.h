// The chunk-parallel gradient of the Hopper backward: all products of (5.31) and (5.32) of a chunk
// once the scans of both directions have left what enters and leaves it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/params.h"
#include "kda/status.h"

namespace kda::cuda::sm90 {

inline constexpr int kGradColumns = 64;  ///< of V at a time
inline constexpr int kGradTokens = 64;   ///< between rows of h and dh: two chunks
/// At most; each has room for what the later chunk of a pair leaves for the earlier one.
inline constexpr int kMostGradBlocks = 288;
/// Of a block: 32 fp32 a thread, K / 64 warpgroups.
constexpr int64_t grad_carry_bytes(int64_t K) { return 2 * K * 32 * 4; }

/// Everything is linear in (do, dfinal_state). With scale = m 2^e the reverse scan leaves R / m and
/// dh / m in bf16; in fp16 in units, of which each chunk and 64 columns of V have
/// their own (rev_unit.cuh).
struct GradParams {
  Tensor q, k, v, beta, grad_o;
  GateParams gate;
  Tensor v_new, R;               ///< [B,T,HV,V]
  Tensor h, dh;                  ///< [rows of kGradTokens, HV, K, V]
  Tensor dq, dk;                 ///< [B,T,HV,K], as q or fp32; of a value head
  Tensor dv, dg, dbeta;          ///< of the inputs: dg of the raw gates
  float* partial = nullptr;      ///< [2 rows, HV, K + 1]: sums of dz by channel, then of dA_log
  const float* units = nullptr;  ///< fp16: [2 rows, HV, V / 64], what 1 in R and dh is
  float4* carry = nullptr;       ///< of as many blocks as there are, kMostGradBlocks at most
  Sequences sequences;           ///< with C = kGradTokens
  const std::byte* records = nullptr;  ///< of prep
  Sequences record_sequences;          ///< with C = 32
  Heads heads;
  float scale = 1;
  float mantissa = 1;  ///< bf16: m
  float beta_factor = 1;
  bool qk_l2norm = false;    ///< q, k are normalised before use
  bool undo_l2norm = false;  ///< dq, dk are those of the inputs, (3.3); group == 1 only
  bool beta_sigmoid = false;
  int32_t most_blocks = 0;  ///< 0: as many as fill the GPU
};

/// The tensors of whose rows a block keeps the first addresses.
enum GradRows : int {
  kRowsQ,
  kRowsK,
  kRowsG,
  kRowsV,
  kRowsDo,
  kRowsR,
  kRowsVNew,
  kRowsDq,
  kRowsDk,
  kRowsDv,
  kRowsDg,
  kGradRows
};

/// GradParams and what the launch adds.
struct GradLaunchParams : GradParams {
  Tensor rows[kGradRows];
  CUtensorMap h_map, dh_map;  ///< boxes of 64 columns x K channels
  struct {
    uint32_t row, head;
  } step;  ///< blocks of the grid in value heads and rows of h
};

Status launch_grad(const GradParams& params, bool fp64, cudaStream_t stream);

}  // namespace kda::cuda::sm90
