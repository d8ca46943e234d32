// Token recurrence (2.1)-(2.5) of one sequence and value head, for decoding.
//
//   u = beta (v - St^T k),  o = s (St^T q + (q . k) u),  S = St + k u^T,  St = exp(g) . S
//
// exp(g) is the sum of two numbers. One alone loses the same in every token of an equal gate, up to
// 2^-25 of the state, which is 5e-4 after 16384 tokens.
//
// The columns of a state are independent: a strip of 4 vectors of them is read once for both
// St^T k and St^T q, and written once; at T = 1 it goes from initial_state to final_state without a
// copy between, if both are fp32, K-first and V is a multiple of kPad.
//
// Scratch in floats: tokens q k decay rest [16, K], v o [16, V]; h [K, V] for other layouts.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/recurrent.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include <cstring>

#include "cpu/cpu_kernels.h"
#include "cpu/cpu_scratch.h"
#include "cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// The vectors of one token.
struct Token {
  const float* q;
  const float* k;
  const float* decay;
  const float* rest;  ///< exp(g) - decay
  const float* v;
  float* o;
  float beta;
  float scale;
  float qk;  ///< q . k
};

/// A state in memory; `from` may be `to`.
struct StatePair {
  const float* from;
  int64_t ld_from;
  float* to;
  int64_t ld_to;
};

HWY_INLINE Vec decayed(Vec decay, Vec rest, Vec h) {
  return hn::MulAdd(decay, h, hn::Mul(rest, h));
}

/// One token on kVectors vectors of columns from column `first` on.
template <int kVectors>
HWY_INLINE void step_strip(int64_t K, const Token& t, const StatePair& state, int64_t first) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* from = state.from + first;
  Vec p0 = hn::Zero(d), p1 = p0, p2 = p0, p3 = p0;
  Vec r0 = p0, r1 = p0, r2 = p0, r3 = p0;
  const auto read = [&](int64_t i, Vec k, Vec q, Vec a, Vec b, Vec& p, Vec& r) HWY_ATTR {
    const Vec x = decayed(a, b, hn::LoadU(d, from + i));
    p = hn::MulAdd(k, x, p);
    r = hn::MulAdd(q, x, r);
  };
  for (int64_t i = 0; i < K; ++i, from += state.ld_from) {
    const Vec k = hn::Set(d, t.k[i]);
    const Vec q = hn::Set(d, t.q[i]);
    const Vec a = hn::Set(d, t.decay[i]);
    const Vec b = hn::Set(d, t.rest[i]);
    read(0, k, q, a, b, p0, r0);
    if constexpr (kVectors > 1) read(lanes, k, q, a, b, p1, r1);
    if constexpr (kVectors > 2) read(2 * lanes, k, q, a, b, p2, r2);
    if constexpr (kVectors > 3) read(3 * lanes, k, q, a, b, p3, r3);
  }
  const Vec beta = hn::Set(d, t.beta);
  const Vec qk = hn::Set(d, t.qk);
  const Vec scale = hn::Set(d, t.scale);
  const auto answer = [&](int64_t column, Vec p, Vec r) HWY_ATTR {
    const Vec u = hn::Mul(beta, hn::Sub(hn::Load(d, t.v + first + column), p));
    hn::Store(hn::Mul(scale, hn::MulAdd(qk, u, r)), d, t.o + first + column);
    return u;
  };
  const Vec u0 = answer(0, p0, r0);
  const Vec u1 = kVectors > 1 ? answer(lanes, p1, r1) : u0;
  const Vec u2 = kVectors > 2 ? answer(2 * lanes, p2, r2) : u0;
  const Vec u3 = kVectors > 3 ? answer(3 * lanes, p3, r3) : u0;
  from = state.from + first;
  float* to = state.to + first;
  const auto write = [&](int64_t i, Vec k, Vec a, Vec b, Vec u) HWY_ATTR {
    hn::StoreU(hn::MulAdd(k, u, decayed(a, b, hn::LoadU(d, from + i))), d, to + i);
  };
  for (int64_t i = 0; i < K; ++i, from += state.ld_from, to += state.ld_to) {
    const Vec k = hn::Set(d, t.k[i]);
    const Vec a = hn::Set(d, t.decay[i]);
    const Vec b = hn::Set(d, t.rest[i]);
    write(0, k, a, b, u0);
    if constexpr (kVectors > 1) write(lanes, k, a, b, u1);
    if constexpr (kVectors > 2) write(2 * lanes, k, a, b, u2);
    if constexpr (kVectors > 3) write(3 * lanes, k, a, b, u3);
  }
}

/// Tokens of one block on one strip: the strip stays in the first-level cache.
template <int kVectors>
HWY_NOINLINE void step_tokens(int64_t K, const Token* tokens, int64_t count, StatePair state,
                              int64_t first) {
  for (int64_t i = 0; i < count; ++i) {
    step_strip<kVectors>(K, tokens[i], state, first);
    state.from = state.to;
    state.ld_from = state.ld_to;
  }
}

void step_block(const Dims& s, const Token* tokens, int64_t count, const StatePair& state) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Floats()));
  int64_t c = 0;
  for (; c + 4 * lanes <= s.Vp; c += 4 * lanes) step_tokens<4>(s.K, tokens, count, state, c);
  switch ((s.Vp - c) / lanes) {
    case 1:
      return step_tokens<1>(s.K, tokens, count, state, c);
    case 2:
      return step_tokens<2>(s.K, tokens, count, state, c);
    case 3:
      return step_tokens<3>(s.K, tokens, count, state, c);
    default:
      return;
  }
}

/// Replaces g by exp(g) rounded, and keeps what that lost.
HWY_INLINE void split_decay(Floats d, float* g, float* rest) {
  const Vec x = hn::Load(d, g);
  const Vec power = exp_of(d, x);
  hn::Store(power, d, g);
  hn::Store(rest_of_exp(d, x, power), d, rest);
}

/// Loads a block of tokens with all pre-processing of section 3.
void load_tokens(const Run& run, const Chunk& block, int64_t hv, const GateTerms& gate,
                 const RecurrentScratch& w, Token* tokens) {
  const Dims& s = run.dims;
  const int64_t n = block.tokens;
  const int64_t h = hv / s.G;
  load_tile(run.tokens(TensorId::kQ, block, h), n, s.K, w.q, s.ldk, n);
  load_tile(run.tokens(TensorId::kK, block, h), n, s.K, w.k, s.ldk, n);
  load_tile(run.tokens(TensorId::kV, block, hv), n, s.V, w.v, s.ldv, n);
  load_tile(run.tokens(TensorId::kG, block, hv), n, s.K, w.decay, s.ldk, n);
  load_column(run.tokens(TensorId::kBeta, block, hv), n, w.beta, n);
  if (run.problem.qk_l2norm) {
    normalise_rows(w.q, s.ldk, n, s.Kp, w.r);
    normalise_rows(w.k, s.ldk, n, s.Kp, w.r);
  }
  apply_gate(gate, w.decay, s.ldk, n, n, s.Kp);
  const Floats d;
  for (int64_t i = 0; i < n; ++i) {
    float* decay = w.decay + i * s.ldk;
    float* rest = w.rest + i * s.ldk;
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR { split_decay(d, decay + c, rest + c); });
    float beta = w.beta[i];
    if (run.problem.beta_sigmoid) {
      beta = (run.problem.allow_neg_eigval ? 2.0f : 1.0f) * sigmoid(beta);
    }
    const float* q = w.q + i * s.ldk;
    const float* k = w.k + i * s.ldk;
    tokens[i] = {q,    k,         decay,          rest, w.v + i * s.ldv, w.o + i * s.ldv,
                 beta, run.scale, dot(q, k, s.Kp)};
  }
}

/// The slot of the pool, or the sequence itself.
int64_t state_row(const Run& run, int64_t sequence) {
  const View& indices = run[TensorId::kStateIndices];
  if (!indices) return sequence;
  int32_t slot;
  std::memcpy(&slot, indices.at(sequence), sizeof slot);
  return slot;
}

/// Whether strips can be read from and written to a state tensor itself.
bool direct(const Dims& s, const Rows& rows) {
  return rows && rows.dtype == DType::kF32 && rows.col == 1 && s.V % kPad == 0;
}

/// How many tokens of a sequence run; -1 in place of a slot means none.
int64_t token_count(const Run& run, int64_t sequence, int64_t slot) {
  const View& accepted = run[TensorId::kNumAccepted];
  if (slot < 0) return 0;
  if (!accepted) return run.list.sequences[static_cast<std::size_t>(sequence)].length();
  int32_t count;
  std::memcpy(&count, accepted.at(sequence), sizeof count);
  return count;
}

/// Zeros in o for the tokens from `first` on.
void zero_outputs(const Run& run, int64_t sequence, int64_t hv, int64_t first,
                  const RecurrentScratch& w) {
  const Dims& s = run.dims;
  const Sequence& tokens = run.list.sequences[static_cast<std::size_t>(sequence)];
  zero_tile(w.o, s.ldv, 1, s.Vp);
  const Chunk rest{tokens.batch, tokens.begin + first, tokens.length() - first, 0, sequence};
  Rows rows = run.tokens(TensorId::kO, rest, hv);
  for (int64_t t = first; t < tokens.length(); ++t) {
    store_tile(w.o, s.ldv, rows, 1, s.V);
    rows.data += rows.row * static_cast<int64_t>(size_of(rows.dtype));
  }
}

/// The first `count` tokens of a sequence, `state` leading from the first state to the last.
void run_tokens(const Run& run, int64_t sequence, int64_t hv, int64_t count, StatePair state,
                const RecurrentScratch& w) {
  const Dims& s = run.dims;
  const Sequence& tokens = run.list.sequences[static_cast<std::size_t>(sequence)];
  const GateTerms gate = load_gate(run, hv, w.bias);
  Token block[kBlock];
  const int64_t end = tokens.begin + count;
  for (int64_t begin = tokens.begin; begin < end; begin += kBlock) {
    const Chunk part{tokens.batch, begin, std::min(kBlock, end - begin), 0, sequence};
    load_tokens(run, part, hv, gate, w, block);
    step_block(s, block, part.tokens, state);
    state.from = state.to;
    state.ld_from = state.ld_to;
    store_tile(w.o, s.ldv, run.tokens(TensorId::kO, part, hv), part.tokens, s.V);
  }
}

void recurrent(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const int64_t sequence = task.index / run.problem.sizes.HV;
  const int64_t hv = task.index % run.problem.sizes.HV;
  Arena arena(task.scratch);
  const RecurrentScratch w(run.problem, s, arena);
  const int64_t slot = state_row(run, sequence);
  const int64_t count = token_count(run, sequence, slot);
  zero_outputs(run, sequence, hv, count, w);
  if (slot < 0 || (count == 0 && run[TensorId::kNumAccepted])) return;
  const Rows initial = run.state(TensorId::kInitialState, slot, hv);
  const Rows final = run.state(TensorId::kFinalState, slot, hv);
  const bool empty = count == 0;
  StatePair state{w.h, s.ldv, w.h, s.ldv};
  const bool to_memory = direct(s, final) && !empty;
  if (to_memory) state.to = reinterpret_cast<float*>(final.data), state.ld_to = final.row;
  if (direct(s, initial) && !empty) {
    state.from = reinterpret_cast<const float*>(initial.data);
    state.ld_from = initial.row;
  } else {
    load_state(initial, s, w.h);
  }
  run_tokens(run, sequence, hv, count, state, w);
  if (!to_memory) store_state(w.h, s, final);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

HWY_EXPORT(recurrent);

Kernel recurrent_kernel() {
  return {Operation::kRecurrent, TaskKind::kSequenceValueHead,
          [](const Problem& problem) { return scratch_floats<RecurrentScratch>(problem); },
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(recurrent)
            (run, task);
          }};
}

}  // namespace kda::cpu
#endif
