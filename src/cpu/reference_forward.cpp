// The token recurrence: (2.1)-(2.5) of docs/semantics.md.
#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "cpu/reference_operations.h"
#include "cpu/reference_recurrence.h"
#include "cpu/reference_scores.h"

namespace kda::reference {
namespace {

struct ForwardScratch {
  ForwardScratch(const Problem& problem, Carver& carver)
      : token(problem, carver),
        S(carver.take(problem.sizes.K, problem.sizes.V)),
        e(carver.take(problem.sizes.V)),
        u(carver.take(problem.sizes.V)),
        o(carver.take(problem.sizes.V)) {}

  Token token;
  double* S;  // [K,V]
  double* e;
  double* u;
  double* o;
};

/// (2.5).
void read_state(const double* q, double s, int64_t K, int64_t V, const double* S, double* o) {
  std::fill_n(o, V, 0.0);
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t j = 0; j < V; ++j) o[j] += q[k] * S[k * V + j];
  }
  for (int64_t j = 0; j < V; ++j) o[j] *= s;
}

/// Scores of every chunk, if asked for.
void store_scores(const Run& run, const Preprocess& inputs) {
  const View Aqk = run.view(TensorId::kAqk);
  const View A = run.view(TensorId::kA);
  if (!Aqk && !A) return;
  const int64_t K = run.problem.sizes.K;
  for_chunks(run, run.problem.sizes.HV, [&](const Chunk& chunk, int64_t head, Carver carver) {
    Scores scores(run.problem, carver);
    cumulative_gate(inputs, chunk, head, K, scores.gamma);
    scores.load(inputs, chunk, head);
    scores.compute(run.problem, chunk.n);
    scores.store(chunk, head, Aqk, A);
  });
}

/// What a sequence does: its row in the states, -1 for none, and how many tokens run.
struct Share {
  int64_t slot;
  int64_t count;
};

/// One sequence and value head.
void run_sequence(const Run& run, const Preprocess& inputs, const Sequence& sequence, Share share,
                  int64_t head, ForwardScratch& scratch) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const int64_t C = run.problem.chunk_size;
  const View o = run.view(TensorId::kO);
  const View h = run.view(TensorId::kH);
  load_state(run.state(TensorId::kInitialState), share.slot, head, K, V, scratch.S);
  for (int64_t t = sequence.begin; t < sequence.begin + share.count; ++t) {
    const int64_t i = t - sequence.begin;
    if (i % C == 0) store_state(h, sequence.first_chunk + i / C, head, K, V, scratch.S);
    scratch.token.load(inputs, {sequence.batch, t, head}, K);
    advance(scratch.token, K, V, scratch.S, scratch.e, scratch.u);
    read_state(scratch.token.q, run.problem.effective_scale(), K, V, scratch.S, scratch.o);
    store_row(o.at(sequence.batch, t, head), o.dtype, scratch.o, V, o.stride[3]);
  }
  store_state(run.state(TensorId::kFinalState), share.slot, head, K, V, scratch.S);
}

/// Zeros in o for the tokens that do not run.
void skip_tokens(const Run& run, const Sequence& sequence, Share share, int64_t head,
                 ForwardScratch& scratch) {
  const View o = run.view(TensorId::kO);
  std::fill_n(scratch.o, run.problem.sizes.V, 0.0);
  for (int64_t t = sequence.begin + share.count; t < sequence.end; ++t) {
    store_row(o.at(sequence.batch, t, head), o.dtype, scratch.o, run.problem.sizes.V, o.stride[3]);
  }
}

Status wrong_slot(int64_t sequence, int32_t slot, const std::string& expected) {
  return {StatusCode::kInvalidArgument,
          fmt::format("state_indices[{}]: found {}, expected {}", sequence, slot, expected)};
}

/// The pool slots, checked; a sequence's own index without state_indices. Where states are written,
/// no slot may occur twice.
Status read_slots(const Run& run, std::vector<Share>& shares) {
  const View indices = run.view(TensorId::kStateIndices);
  std::vector<bool> used(indices ? static_cast<std::size_t>(run.problem.sizes.P) : 0);
  for (std::size_t n = 0; n < shares.size(); ++n) {
    const auto row = static_cast<int64_t>(n);
    shares[n].slot = row;
    if (!indices) continue;
    const auto slot = static_cast<int32_t>(load_element(indices.at(row), indices.dtype));
    shares[n].slot = slot;
    if (slot == -1) continue;
    if (slot < -1 || slot >= run.problem.sizes.P) {
      return wrong_slot(row, slot, fmt::format("-1..{}", run.problem.sizes.P - 1));
    }
    if (!run.problem.has(TensorId::kFinalState)) continue;
    if (used[static_cast<std::size_t>(slot)]) {
      return wrong_slot(row, slot, "a slot that no earlier sequence has");
    }
    used[static_cast<std::size_t>(slot)] = true;
  }
  return {};
}

/// The counts of tokens, checked; all of a sequence without num_accepted, none of a skipped one.
Status read_counts(const Run& run, std::vector<Share>& shares) {
  const View accepted = run.view(TensorId::kNumAccepted);
  for (std::size_t n = 0; n < shares.size(); ++n) {
    const auto row = static_cast<int64_t>(n);
    const int64_t length = run.list.sequences[n].length();
    shares[n].count = shares[n].slot < 0 ? 0 : length;
    if (!accepted || shares[n].slot < 0) continue;
    const auto count = static_cast<int32_t>(load_element(accepted.at(row), accepted.dtype));
    if (count < 0 || count > length) {
      return {StatusCode::kInvalidArgument,
              fmt::format("num_accepted[{}]: found {}, expected 0..{}, the tokens of the sequence",
                          row, count, length)};
    }
    shares[n].count = count;
  }
  return {};
}

}  // namespace

void Token::load(const Preprocess& inputs, const Position& at, int64_t K) {
  inputs.query(at, q);
  inputs.key(at, k);
  inputs.value(at, v);
  inputs.gate(at, decay);
  for (int64_t i = 0; i < K; ++i) decay[i] = std::exp(decay[i]);
  beta = inputs.beta(at);
}

void advance(const Token& token, int64_t K, int64_t V, double* S, double* e, double* u) {
  std::copy_n(token.v, V, e);
  for (int64_t k = 0; k < K; ++k) {
    double* row = S + k * V;
    for (int64_t j = 0; j < V; ++j) {
      row[j] *= token.decay[k];     // (2.1)
      e[j] -= token.k[k] * row[j];  // (2.2)
    }
  }
  for (int64_t j = 0; j < V; ++j) u[j] = token.beta * e[j];  // (2.3)
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t j = 0; j < V; ++j) S[k * V + j] += token.k[k] * u[j];  // (2.4)
  }
}

int64_t chunk_forward_scratch(const Problem& problem) {
  return std::max(doubles_of<ForwardScratch>(problem), doubles_of<Scores>(problem));
}

Status chunk_forward(const Run& run) {
  const Preprocess inputs(run.problem, run.args);
  for_sequences(
      run, run.problem.sizes.HV, [&](const Sequence& sequence, int64_t head, Carver carver) {
        ForwardScratch scratch(run.problem, carver);
        run_sequence(run, inputs, sequence, {sequence.index, sequence.length()}, head, scratch);
      });
  store_scores(run, inputs);
  return {};
}

Status recurrent(const Run& run) {
  std::vector<Share> shares(run.list.sequences.size());
  if (Status status = read_slots(run, shares); !status.ok()) return status;
  if (Status status = read_counts(run, shares); !status.ok()) return status;
  const Preprocess inputs(run.problem, run.args);
  for_sequences(run, run.problem.sizes.HV,
                [&](const Sequence& sequence, int64_t head, Carver carver) {
                  ForwardScratch scratch(run.problem, carver);
                  const Share share = shares[static_cast<std::size_t>(sequence.index)];
                  // With num_accepted states are updated in place: without a token they stay.
                  const bool stays = share.count == 0 && run.view(TensorId::kNumAccepted);
                  if (share.slot >= 0 && !stays) {
                    run_sequence(run, inputs, sequence, share, head, scratch);
                  }
                  skip_tokens(run, sequence, share, head, scratch);
                });
  return {};
}

}  // namespace kda::reference
