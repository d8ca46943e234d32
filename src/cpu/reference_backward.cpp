// The exact gradient of the token recurrence: (2.6)-(2.13) of docs/semantics.md.
//
// Chunks only bound the memory: a forward pass keeps the state that enters each chunk, and the
// backward walks the chunks in reverse, recomputing the states inside one at a time.
#include <algorithm>

#include "cpu/reference_operations.h"
#include "cpu/reference_recurrence.h"

namespace kda::reference {
namespace {

int64_t most_chunks(const Problem& problem) {
  return problem.sizes.T / problem.chunk_size + (problem.sizes.T % problem.chunk_size != 0 ? 1 : 0);
}

struct BackwardScratch {
  BackwardScratch(const Problem& problem, Carver& carver)
      : token(problem, carver),
        checkpoints(carver.take(most_chunks(problem), problem.sizes.K, problem.sizes.V)),
        states(carver.take(problem.chunk_size + 1, problem.sizes.K, problem.sizes.V)),
        e(carver.take(problem.chunk_size, problem.sizes.V)),
        u(carver.take(problem.chunk_size, problem.sizes.V)),
        D(carver.take(problem.sizes.K, problem.sizes.V)),
        d_o(carver.take(problem.sizes.V)),
        du(carver.take(problem.sizes.V)),
        dg(carver.take(problem.sizes.K)),
        ddt_bias(carver.take(problem.sizes.K)),
        dq(carver.take(problem.sizes.T, problem.sizes.K)),
        dk(carver.take(problem.sizes.T, problem.sizes.K)) {}

  Token token;
  double* checkpoints;  // [NT,K,V], entering each chunk
  double* states;       // [C+1,K,V], entering each token of the chunk, and leaving the last
  double* e;            // [C,V]
  double* u;            // [C,V]
  double* D;            // [K,V], gradient of the state
  double* d_o;
  double* du;  // and de
  double* dg;
  double* ddt_bias;
  double dA_log = 0;
  double* dq;  // [L,K], summed over the value heads of the group
  double* dk;  // [L,K]
};

/// Where the sequences leave their terms of dA_log and ddt_bias, to be added in a fixed order.
struct ParameterPartials {
  ParameterPartials(const Problem& problem, Carver& carver)
      : dA_log(carver.take(problem.sequences(), problem.sizes.HV)),
        ddt_bias(carver.take(problem.sequences(), problem.sizes.HV, problem.sizes.K)) {}

  double* dA_log;    // [N,HV]
  double* ddt_bias;  // [N,HV,K]
};

/// One sequence and value head.
class HeadBackward {
 public:
  HeadBackward(const Run& run, const Preprocess& inputs, const Sequence& sequence, int64_t head,
               BackwardScratch& scratch)
      : run_(run),
        inputs_(inputs),
        sequence_(sequence),
        head_(head),
        x_(scratch),
        K_(run.problem.sizes.K),
        V_(run.problem.sizes.V) {}

  void operator()() {
    x_.dA_log = 0;
    std::fill_n(x_.ddt_bias, K_, 0.0);
    const int64_t C = run_.problem.chunk_size;
    const int64_t chunks = chunks_of(sequence_, C);
    save_checkpoints(C);
    load_state(run_.state(TensorId::kDfinalState), sequence_.index, head_, K_, V_, x_.D);
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const Chunk chunk = chunk_of(sequence_, c, C);
      recompute_states(chunk, x_.checkpoints + c * K_ * V_);
      for (int64_t i = chunk.n - 1; i >= 0; --i) step_back(chunk.begin + i, i);
    }
    store_state(run_.state(TensorId::kDinitialState), sequence_.index, head_, K_, V_, x_.D);
  }

 private:
  void save_checkpoints(int64_t C) {
    double* S = x_.states;
    load_state(run_.state(TensorId::kInitialState), sequence_.index, head_, K_, V_, S);
    for (int64_t i = 0; i < sequence_.length(); ++i) {
      if (i % C == 0) std::copy_n(S, K_ * V_, x_.checkpoints + i / C * K_ * V_);
      x_.token.load(inputs_, position(sequence_.begin + i), K_);
      advance(x_.token, K_, V_, S, x_.e, x_.u);
    }
  }

  void recompute_states(const Chunk& chunk, const double* entering) {
    std::copy_n(entering, K_ * V_, x_.states);
    for (int64_t i = 0; i < chunk.n; ++i) {
      double* S = x_.states + (i + 1) * K_ * V_;
      std::copy_n(S - K_ * V_, K_ * V_, S);
      x_.token.load(inputs_, position(chunk.begin + i), K_);
      advance(x_.token, K_, V_, S, x_.e + i * V_, x_.u + i * V_);
    }
  }

  /// Token t, row i of its chunk.
  void step_back(int64_t t, int64_t i) {
    x_.token.load(inputs_, position(t), K_);
    const View d_o = run_.view(TensorId::kDo);
    load_row(x_.d_o, d_o.at(sequence_.batch, t, head_), d_o.dtype, V_, d_o.stride[3]);
    const double* e = x_.e + i * V_;
    const int64_t row = (t - sequence_.begin) * K_;
    through_output(x_.states + (i + 1) * K_ * V_, x_.dq + row);
    double dbeta = 0;
    for (int64_t j = 0; j < V_; ++j) {
      dbeta += x_.du[j] * e[j];   // (2.8)
      x_.du[j] *= x_.token.beta;  // de, (2.9)
    }
    through_update(x_.states + i * K_ * V_, x_.u + i * V_, x_.dk + row);
    store_token(t, dbeta);
  }

  /// (2.6), (2.7) and du of (2.8), with S the state that leaves the token.
  void through_output(const double* S, double* dq) {
    const double s = run_.problem.effective_scale();
    std::fill_n(x_.du, V_, 0.0);
    for (int64_t k = 0; k < K_; ++k) {
      double* D = x_.D + k * V_;
      const double sq = s * x_.token.q[k];
      const double key = x_.token.k[k];
      double inner = 0;
      for (int64_t j = 0; j < V_; ++j) {
        D[j] += sq * x_.d_o[j];
        inner += S[k * V_ + j] * x_.d_o[j];
        x_.du[j] += key * D[j];
      }
      dq[k] += s * inner;
    }
  }

  /// (2.10)-(2.13), with S the state that enters the token and du now de.
  void through_update(const double* S, const double* u, double* dk) {
    const double* de = x_.du;
    for (int64_t k = 0; k < K_; ++k) {
      double* D = x_.D + k * V_;
      const double key = x_.token.k[k];
      const double decay = x_.token.decay[k];
      double column = 0;
      double row = 0;
      double dg = 0;
      for (int64_t j = 0; j < V_; ++j) {
        const double decayed = decay * S[k * V_ + j];
        const double Dt = D[j] - key * de[j];
        column += D[j] * u[j];
        row += decayed * de[j];
        dg += decayed * Dt;
        D[j] = decay * Dt;
      }
      dk[k] += column - row;
      x_.dg[k] = dg;
    }
  }

  void store_token(int64_t t, double dbeta) {
    const Position at = position(t);
    if (const View dv = run_.view(TensorId::kDv)) {
      store_row(dv.at(at.batch, t, head_), dv.dtype, x_.du, V_, dv.stride[3]);
    }
    if (const View out = run_.view(TensorId::kDbeta)) {
      store_element(out.at(at.batch, t, head_), out.dtype, inputs_.beta_gradient(at, dbeta));
    }
    inputs_.gate_gradient(at, x_.dg, x_.dA_log, x_.ddt_bias);
    if (const View dg = run_.view(TensorId::kDg)) {
      store_row(dg.at(at.batch, t, head_), dg.dtype, x_.dg, K_, dg.stride[3]);
    }
  }

  Position position(int64_t t) const { return {sequence_.batch, t, head_}; }

  const Run& run_;
  const Preprocess& inputs_;
  const Sequence& sequence_;
  int64_t head_;
  BackwardScratch& x_;
  int64_t K_;
  int64_t V_;
};

/// dq and dk of one q/k head: (3.3) after the sum over the group.
void store_query_and_key(const Run& run, const Preprocess& inputs, const Sequence& sequence,
                         int64_t h, BackwardScratch& scratch) {
  const int64_t K = run.problem.sizes.K;
  const int64_t group = run.problem.sizes.HV / run.problem.sizes.H;
  const View dq = run.view(TensorId::kDq);
  const View dk = run.view(TensorId::kDk);
  for (int64_t t = sequence.begin; t < sequence.end; ++t) {
    const Position at{sequence.batch, t, h * group};
    const int64_t row = (t - sequence.begin) * K;
    if (dq) {
      inputs.query_gradient(at, scratch.dq + row);
      store_row(dq.at(sequence.batch, t, h), dq.dtype, scratch.dq + row, K, dq.stride[3]);
    }
    if (dk) {
      inputs.key_gradient(at, scratch.dk + row);
      store_row(dk.at(sequence.batch, t, h), dk.dtype, scratch.dk + row, K, dk.stride[3]);
    }
  }
}

/// (3.6), (3.7), (3.10): sums over the sequences in their order.
void store_parameters(const Run& run, const ParameterPartials& partials) {
  const int64_t HV = run.problem.sizes.HV;
  const int64_t K = run.problem.sizes.K;
  const auto sequences = static_cast<int64_t>(run.list.sequences.size());
  const View dA_log = run.view(TensorId::kDALog);
  const View ddt_bias = run.view(TensorId::kDdtBias);
  for (int64_t head = 0; head < HV; ++head) {
    double sum = 0;
    for (int64_t n = 0; n < sequences; ++n) sum += partials.dA_log[n * HV + head];
    if (dA_log) store_element(dA_log.at(head), dA_log.dtype, sum);
    for (int64_t k = 0; ddt_bias && k < K; ++k) {
      double bias_sum = 0;
      for (int64_t n = 0; n < sequences; ++n) {
        bias_sum += partials.ddt_bias[(n * HV + head) * K + k];
      }
      store_element(ddt_bias.at(head, k), ddt_bias.dtype, bias_sum);
    }
  }
}

}  // namespace

int64_t chunk_backward_scratch(const Problem& problem) {
  return doubles_of<BackwardScratch>(problem);
}

int64_t chunk_backward_shared(const Problem& problem) {
  return has_work(problem, problem.sizes.T) ? doubles_of<ParameterPartials>(problem) : 0;
}

Status chunk_backward(const Run& run) {
  if (!has_work(run.problem, run.list.tokens_used)) return {};
  const Sizes& sizes = run.problem.sizes;
  const Preprocess inputs(run.problem, run.args);
  Carver shared(run.shared);
  const ParameterPartials partials(run.problem, shared);
  const int64_t group = sizes.HV / sizes.H;
  for_sequences(run, sizes.H, [&](const Sequence& sequence, int64_t h, Carver carver) {
    BackwardScratch scratch(run.problem, carver);
    std::fill_n(scratch.dq, sequence.length() * sizes.K, 0.0);
    std::fill_n(scratch.dk, sequence.length() * sizes.K, 0.0);
    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      HeadBackward(run, inputs, sequence, head, scratch)();
      const int64_t row = sequence.index * sizes.HV + head;
      partials.dA_log[row] = scratch.dA_log;
      std::copy_n(scratch.ddt_bias, sizes.K, partials.ddt_bias + row * sizes.K);
    }
    store_query_and_key(run, inputs, sequence, h, scratch);
  });
  store_parameters(run, partials);
  return {};
}

}  // namespace kda::reference
