// What every task of the fast CPU backend sees: one run, its sizes, its tiles in memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/sequences.h"
#include "core/view.h"
#include "kda/problem.h"

namespace kda::cpu {

/// Tiles are padded to this many floats: one AVX-512 register, a multiple of all smaller ones.
constexpr int64_t kPad = 16;
/// Rows of a sub-chunk (docs/semantics.md 6.2).
constexpr int64_t kBlock = 16;

constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }
/// Distance of tile rows: an odd number of cache lines, so that a column of a tile spreads over all
/// sets of the first-level cache.
constexpr int64_t leading(int64_t n) { return ((n + kPad - 1) / kPad | 1) * kPad; }

/// Sizes of the tiles of one head. p: padded, ld: row distance. V is 0 if no tensor of the
/// operation has it.
struct Dims {
  explicit Dims(const Problem& problem);

  int64_t C, K, V, G;
  int64_t Kp, Vp;
  int64_t ldk, ldv, ldc;
};

/// Hands out tiles of one block of floats; with a null base it only counts.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  /// The count stops at a number that no machine has, so that it does not overflow.
  float* take(int64_t floats) {
    float* tile = base_ == nullptr ? nullptr : base_ + used_;
    used_ = std::min(used_ + std::min(padded(floats), kMost), kMost);
    return tile;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kMost = int64_t{1} << 60;

  float* base_;
  int64_t used_ = 0;
};

/// Rows of a tensor: row r, column c lies r * row + c * col elements after data.
struct Rows {
  std::byte* data = nullptr;
  DType dtype = DType::kNone;
  int64_t row = 0;
  int64_t col = 0;

  explicit operator bool() const { return data != nullptr; }
};

/// One chunk of one sequence.
struct Chunk {
  int64_t batch;
  int64_t begin;   ///< first token
  int64_t tokens;  ///< valid rows n
  int64_t row;     ///< row of h and dh
  int64_t sequence;

  /// Rows that are computed: whole sub-chunks.
  int64_t rows() const { return padded(tokens); }
};

/// One run of one operation, shared by its tasks.
struct Run {
  Run(const Problem& problem, const Args& args, SequenceList list);

  const View& operator[](TensorId id) const { return views[static_cast<std::size_t>(id)]; }
  bool wants(TensorId id) const { return static_cast<bool>((*this)[id]); }
  /// The rows of one head from token `begin` on; columns over the last index.
  Rows tokens(TensorId id, const Chunk& chunk, int64_t head) const;
  /// The (k, v) matrix of one state, or of one row of h and dh.
  Rows state(TensorId id, int64_t index, int64_t head) const;
  /// One row of a tensor [HV, K], one element of a tensor [HV].
  Rows head_row(TensorId id, int64_t head) const;

  int64_t chunk_count(int64_t sequence) const;
  Chunk chunk(int64_t sequence, int64_t c) const;

  const Problem& problem;
  std::array<View, kTensorCount> views{};
  SequenceList list;
  Dims dims;
  float scale;
  std::vector<Chunk> chunks;  ///< all of them, for operations whose tasks are chunks
};

/// What one task works on.
struct Task {
  int64_t index;      ///< number of the task, see TaskKind
  float* scratch;     ///< of this thread
  std::byte* shared;  ///< of the whole run
};

/// The tiles of a chunk that every chunked operation starts from.
///
///   q k decay pc sc | C x ldk each     v | C x ldv     beta rq rk | C     bias | Kp
struct ChunkTiles {
  ChunkTiles(const Dims& dims, Arena& arena);

  float* q;  ///< normalised if asked for
  float* k;  ///< likewise
  float* v;
  float* decay;  ///< exp(g), one factor a token; 1 on padding rows
  float* pc;     ///< 2^Gamma: decay from the start of the chunk to the row, inclusive
  float* sc;     ///< 2^(gamma - Gamma): decay from the row, exclusive, to the end of the chunk
  float* rest;   ///< what 2^gamma in the last row of pc lacks, one number a channel
  float* beta;   ///< activated
  float* rq;     ///< 1 / norm of the rows of q
  float* rk;
  float* bias;  ///< dt_bias of the head, or 0
};

/// Room for the score matrices and their gradients.
///
///   a b c | C x ldk each     t | max(Kp, C) x ldc     total | C/16 x ldk
struct IntraTiles {
  IntraTiles(const Dims& dims, Arena& arena);

  float* a;
  float* b;
  float* c;
  float* t;
  float* total;
};

}  // namespace kda::cpu
