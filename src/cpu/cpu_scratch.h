// Scratch of each operation: which tiles a thread has. The same constructor counts and hands out.
#pragma once

#include <algorithm>

#include "core/shape.h"
#include "cpu/cpu_run.h"

namespace kda::cpu {

/// Floats that a scratch type takes for a problem.
template <class Scratch>
int64_t scratch_floats(const Problem& problem) {
  Arena arena(nullptr);
  Scratch(problem, Dims(problem), arena);
  return arena.used();
}

struct ForwardScratch {
  ForwardScratch(const Problem&, const Dims& s, Arena& arena)
      : chunk(s, arena),
        intra(s, arena),
        x(arena.take(2 * s.C * s.ldk)),
        y(arena.take(2 * s.C * s.ldv)),
        v_new(arena.take(s.C * s.ldv)),
        aqk(arena.take(s.C * s.ldc)),
        solver(arena.take(s.C * s.ldc)),
        h(arena.take(s.Kp * s.ldv)) {}

  ChunkTiles chunk;
  IntraTiles intra;
  float* x;  ///< [ke; s qg], later kg
  float* y;  ///< [ke; s qg] h, then r above and o below
  float* v_new;
  float* aqk;
  float* solver;
  float* h;
};

struct RecurrentScratch {
  RecurrentScratch(const Problem&, const Dims& s, Arena& arena) {
    for (float** tile : {&q, &k, &decay, &rest}) *tile = arena.take(kBlock * s.ldk);
    for (float** tile : {&v, &o}) *tile = arena.take(kBlock * s.ldv);
    for (float** column : {&beta, &r}) *column = arena.take(kBlock);
    bias = arena.take(s.Kp);
    h = arena.take(s.Kp * s.ldv);
  }

  float* q;
  float* k;
  float* decay;
  float* rest;
  float* v;
  float* o;
  float* beta;
  float* r;
  float* bias;
  float* h;
};

/// What the first pass of the backward keeps of each chunk of one sequence.
struct ChunkStore {
  ChunkStore(const Problem& problem, const Dims& s, Arena& arena)
      : rows_(s.C * s.ldv),
        scores_(s.C * s.ldc),
        state_(keeps_h(problem) ? s.Kp * s.ldv : 0),
        base_(arena.take(
            saturating_product((problem.sizes.T + s.C - 1) / s.C, rows_ + 2 * scores_ + state_))) {}

  /// The states come from the caller if the forward saved them in fp32.
  static bool keeps_h(const Problem& problem) { return problem[TensorId::kH].dtype != DType::kF32; }
  float* v_new(int64_t c) const { return base_ + c * (rows_ + 2 * scores_ + state_); }
  float* aqk(int64_t c) const { return v_new(c) + rows_; }
  float* solver(int64_t c) const { return aqk(c) + scores_; }
  float* h(int64_t c) const { return solver(c) + scores_; }

 private:
  int64_t rows_;
  int64_t scores_;
  int64_t state_;
  float* base_;
};

struct BackwardScratch {
  BackwardScratch(const Problem& problem, const Dims& s, Arena& arena)
      : chunk(s, arena), intra(s, arena), store(problem, s, arena) {
    for (float** tile : {&x, &products}) *tile = arena.take(2 * s.C * s.ldk);
    for (float** tile : {&kg, &dkx, &dq2, &z, &dkc}) *tile = arena.take(s.C * s.ldk);
    do_r = arena.take(2 * s.C * s.ldv);
    for (float** tile : {&y, &dv}) *tile = arena.take(s.C * s.ldv);
    for (float** tile : {&h, &dh}) *tile = arena.take(s.Kp * s.ldv);
    for (float** tile : {&dP, &dL}) *tile = arena.take(s.C * s.ldc);
    turned = arena.take(s.Vp * std::max(s.ldk, s.ldc));
    whole = arena.take(s.Kp);
    dbeta = arena.take(s.C);
    const int64_t sums = s.G > 1 ? (problem.sizes.T + s.C - 1) / s.C * s.C * s.ldk : 0;
    dq_sum = arena.take(sums);
    dk_sum = arena.take(sums);
  }

  ChunkTiles chunk;
  IntraTiles intra;
  ChunkStore store;
  float* x;         ///< [s qg; -beta ke]
  float* products;  ///< [do h^T; R h^T]
  float* kg;
  float* dkx;
  float* dq2;
  float* z;
  float* dkc;
  float* do_r;  ///< [do; R]
  float* y;     ///< r in the first pass, dv' in the second
  float* dv;    ///< beta . R
  float* h;
  float* dh;
  float* dP;
  float* dL;
  float* turned;  ///< h^T, dh^T or v'^T
  float* whole;   ///< 2^gamma . rowsum_V(h . dh)
  float* dbeta;
  float* dq_sum;  ///< over the value heads of the group so far, whole sequence
  float* dk_sum;
};

/// Enough for each of the stages.
struct StageScratch {
  StageScratch(const Problem&, const Dims& s, Arena& arena) : chunk(s, arena), intra(s, arena) {
    for (float** tile : {&x, &products}) *tile = arena.take(2 * s.C * s.ldk);
    for (float** tile : {&dkx, &dq2, &z, &dkc, &dq_sum, &dk_sum}) {
      *tile = arena.take(s.C * s.ldk);
    }
    for (float** tile : {&do_r, &y}) *tile = arena.take(2 * s.C * s.ldv);
    for (float** tile : {&h, &dh}) *tile = arena.take(s.Kp * s.ldv);
    for (float** tile : {&aqk, &a}) *tile = arena.take(s.C * s.ldc);
    turned = arena.take(s.Vp * std::max(s.ldk, s.ldc));
    whole = arena.take(s.Kp);
    dbeta = arena.take(s.C);
  }

  ChunkTiles chunk;
  IntraTiles intra;
  float* x;
  float* products;
  float* dkx;
  float* dq2;
  float* z;
  float* dkc;
  float* dq_sum;
  float* dk_sum;
  float* do_r;
  float* y;
  float* h;
  float* dh;
  float* aqk;  ///< Aqk or dP
  float* a;    ///< A, the system or dL
  float* turned;
  float* whole;
  float* dbeta;
};

}  // namespace kda::cpu
