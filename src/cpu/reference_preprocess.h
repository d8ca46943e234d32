// Section 3 of docs/semantics.md in float64: normalised q and k, gate, beta, and their gradients.
#pragma once

#include <cstdint>

#include "core/view.h"
#include "cpu/reference_run.h"
#include "kda/plan.h"
#include "kda/problem.h"

namespace kda::reference {

/// A token of a value head.
struct Position {
  int64_t batch;
  int64_t token;
  int64_t head;
};

/// The inputs as the recurrence sees them. Options that are off leave the tensors as they are, so
/// that the stages read their inputs here too.
class Preprocess {
 public:
  Preprocess(const Problem& problem, const Args& args);

  /// (3.2) for the q/k head of the value head, K values each.
  void query(const Position& at, double* q) const;
  void key(const Position& at, double* k) const;
  void value(const Position& at, double* v) const;
  /// (3.4) or (3.8): natural-log decay, K values.
  void gate(const Position& at, double* g) const;
  /// (3.12).
  double beta(const Position& at) const;

  /// Gradient of a raw row of q or k from the one of the normalised row, in place: (3.3).
  void query_gradient(const Position& at, double* dq) const;
  void key_gradient(const Position& at, double* dk) const;
  /// Gradient of the raw gate from the one of the decay, in place: (3.5) or (3.9). Adds this
  /// token's terms of (3.6) or (3.10) and of (3.7).
  void gate_gradient(const Position& at, double* dg, double& dA_log, double* ddt_bias) const;
  /// (3.13).
  double beta_gradient(const Position& at, double dbeta) const;

 private:
  void normalised(const View& view, const Position& at, double* y) const;
  void normalised_gradient(const View& view, const Position& at, double* dy) const;
  double gate_slope(int64_t head) const;
  /// g_raw + dt_bias of one channel.
  double gate_input(const Position& at, int64_t channel) const;

  const Problem& problem_;
  int64_t group_;  ///< value heads per q/k head
  View q_, k_, v_, g_, beta_, A_log_, dt_bias_;
};

/// (4.1)-(4.2) for the rows of a chunk, [n,K], with the clamp of 6.5.
void cumulative_gate(const Preprocess& inputs, const Chunk& chunk, int64_t head, int64_t K,
                     double* gamma);

}  // namespace kda::reference
