// The stages of the backward, each straight from its formula: section 5 of docs/semantics.md.
#include <algorithm>
#include <cmath>

#include "cpu/reference_operations.h"
#include "cpu/reference_preprocess.h"

namespace kda::reference {
namespace {

struct ReverseScratch {
  ReverseScratch(const Problem& problem, Carver& carver)
      : D(carver.take(problem.sizes.K, problem.sizes.V)),
        gamma(carver.take(problem.chunk_size, problem.sizes.K)),
        qg(carver.take(problem.chunk_size, problem.sizes.K)),
        kg(carver.take(problem.chunk_size, problem.sizes.K)),
        w(carver.take(problem.chunk_size, problem.sizes.K)),
        Aqk(carver.take(problem.chunk_size, problem.chunk_size)),
        d_o(carver.take(problem.chunk_size, problem.sizes.V)),
        dv_new(carver.take(problem.chunk_size, problem.sizes.V)) {}

  double* D;       // [K,V]
  double* gamma;   // [C,K]
  double* qg;      // [C,K]
  double* kg;      // [C,K]
  double* w;       // [C,K]
  double* Aqk;     // [C,C]
  double* d_o;     // [C,V]
  double* dv_new;  // [C,V]
};

struct WyScratch {
  WyScratch(const Problem& problem, Carver& carver)
      : q(carver.take(problem.chunk_size, problem.sizes.K)),
        k(carver.take(problem.chunk_size, problem.sizes.K)),
        gamma(carver.take(problem.chunk_size, problem.sizes.K)),
        dq(carver.take(problem.chunk_size, problem.sizes.K)),
        dkx(carver.take(problem.chunk_size, problem.sizes.K)),
        Y(carver.take(problem.chunk_size, problem.sizes.K)),
        dg(carver.take(problem.chunk_size, problem.sizes.K)),
        v(carver.take(problem.chunk_size, problem.sizes.V)),
        v_new(carver.take(problem.chunk_size, problem.sizes.V)),
        dv_new(carver.take(problem.chunk_size, problem.sizes.V)),
        d_o(carver.take(problem.chunk_size, problem.sizes.V)),
        R(carver.take(problem.chunk_size, problem.sizes.V)),
        A(carver.take(problem.chunk_size, problem.chunk_size)),
        scores(carver.take(problem.chunk_size, problem.chunk_size)),
        h(carver.take(problem.sizes.K, problem.sizes.V)),
        dh(carver.take(problem.sizes.K, problem.sizes.V)),
        beta(carver.take(problem.chunk_size)),
        dbeta(carver.take(problem.chunk_size)) {}

  double* q;       // [C,K]
  double* k;       // [C,K]
  double* gamma;   // [C,K]
  double* dq;      // [C,K]
  double* dkx;     // [C,K], then dk
  double* Y;       // [C,K], then beta . 2^Gamma . Y
  double* dg;      // [C,K]
  double* v;       // [C,V]
  double* v_new;   // [C,V]
  double* dv_new;  // [C,V]
  double* d_o;     // [C,V]
  double* R;       // [C,V]
  double* A;       // [C,C]
  double* scores;  // [C,C], dP and then dL
  double* h;       // [K,V]
  double* dh;      // [K,V]
  double* beta;    // [C]
  double* dbeta;   // [C]
};

struct IntraScratch {
  IntraScratch(const Problem& problem, Carver& carver)
      : q(carver.take(problem.chunk_size, problem.sizes.K)),
        k(carver.take(problem.chunk_size, problem.sizes.K)),
        gamma(carver.take(problem.chunk_size, problem.sizes.K)),
        dq(carver.take(problem.chunk_size, problem.sizes.K)),
        dk(carver.take(problem.chunk_size, problem.sizes.K)),
        dq2(carver.take(problem.chunk_size, problem.sizes.K)),
        z(carver.take(problem.chunk_size, problem.sizes.K)),
        dkc(carver.take(problem.chunk_size, problem.sizes.K)),
        partial(carver.take(problem.chunk_size, problem.sizes.K)),
        dP(carver.take(problem.chunk_size, problem.chunk_size)),
        dL(carver.take(problem.chunk_size, problem.chunk_size)),
        beta(carver.take(problem.chunk_size)) {}

  double* q;        // [C,K]
  double* k;        // [C,K]
  double* gamma;    // [C,K]
  double* dq;       // [C,K], summed over the group
  double* dk;       // [C,K], summed over the group
  double* dq2;      // [C,K]
  double* z;        // [C,K]
  double* dkc;      // [C,K]
  double* partial;  // [C,K]
  double* dP;       // [C,C]
  double* dL;       // [C,C]
  double* beta;     // [C]
};

double inner(const double* x, const double* y, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

/// out += A^T x with A lower triangular, as (5.3) and (5.10) need it.
void add_transposed_lower(const double* A, int64_t C, const double* x, int64_t n, int64_t width,
                          double* out) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      for (int64_t c = 0; c < width; ++c) out[j * width + c] += A[i * C + j] * x[i * width + c];
    }
  }
}

/// (5.3)-(5.6) for one chunk.
void reverse_chunk(const Run& run, const Chunk& chunk, int64_t head, ReverseScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const int64_t C = run.problem.chunk_size;
  const double s = run.problem.effective_scale();
  store_state(run.view(TensorId::kDh), chunk.row, head, K, V, x.D);
  load_chunk(run.view(TensorId::kGamma), chunk, head, K, x.gamma);
  load_chunk(run.view(TensorId::kQg), chunk, head, K, x.qg);
  load_chunk(run.view(TensorId::kKg), chunk, head, K, x.kg);
  load_chunk(run.view(TensorId::kW), chunk, head, K, x.w);
  load_chunk(run.view(TensorId::kAqk), chunk, head, C, x.Aqk);
  load_chunk(run.view(TensorId::kDo), chunk, head, V, x.d_o);
  std::fill_n(x.dv_new, chunk.n * V, 0.0);
  add_transposed_lower(x.Aqk, C, x.d_o, chunk.n, V, x.dv_new);
  for (int64_t i = 0; i < chunk.n; ++i) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t j = 0; j < V; ++j) x.dv_new[i * V + j] += x.kg[i * K + k] * x.D[k * V + j];
    }
  }
  store_chunk(run.view(TensorId::kDvNew), chunk, head, V, x.dv_new);
  for (int64_t k = 0; k < K; ++k) {
    const double decay = std::exp2(x.gamma[(chunk.n - 1) * K + k]);
    for (int64_t j = 0; j < V; ++j) x.D[k * V + j] *= decay;
  }
  for (int64_t i = 0; i < chunk.n; ++i) {
    for (int64_t k = 0; k < K; ++k) {
      const double sqg = s * x.qg[i * K + k];
      const double w = x.w[i * K + k];
      for (int64_t j = 0; j < V; ++j) {
        x.D[k * V + j] += sqg * x.d_o[i * V + j] - w * x.dv_new[i * V + j];
      }
    }
  }
}

void load_wy(const Run& run, const Preprocess& inputs, const Chunk& chunk, int64_t head,
             WyScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  for (int64_t i = 0; i < chunk.n; ++i) {
    const Position at{chunk.batch, chunk.begin + i, head};
    inputs.query(at, x.q + i * K);
    inputs.key(at, x.k + i * K);
    inputs.value(at, x.v + i * V);
    x.beta[i] = inputs.beta(at);
  }
  load_chunk(run.view(TensorId::kGamma), chunk, head, K, x.gamma);
  load_chunk(run.view(TensorId::kVNew), chunk, head, V, x.v_new);
  load_chunk(run.view(TensorId::kDvNew), chunk, head, V, x.dv_new);
  load_chunk(run.view(TensorId::kDo), chunk, head, V, x.d_o);
  load_chunk(run.view(TensorId::kA), chunk, head, run.problem.chunk_size, x.A);
  load_state(run.view(TensorId::kH), chunk.row, head, K, V, x.h);
  load_state(run.view(TensorId::kDh), chunk.row, head, K, V, x.dh);
}

/// (5.7), (5.8), (5.10) in the form of (5.27) and (5.29), (5.12); dkx and Y stay apart for dg.
void wy_rows(const Run& run, const Chunk& chunk, WyScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const double s = run.problem.effective_scale();
  std::fill_n(x.R, chunk.n * V, 0.0);
  add_transposed_lower(x.A, run.problem.chunk_size, x.dv_new, chunk.n, V, x.R);
  for (int64_t i = 0; i < chunk.n; ++i) {
    x.dbeta[i] = inner(x.R + i * V, x.v + i * V, V);
    for (int64_t k = 0; k < K; ++k) {
      const int64_t at = i * K + k;
      const double entering = std::exp2(x.gamma[at]);
      const double leaving = std::exp2(x.gamma[(chunk.n - 1) * K + k] - x.gamma[at]);
      x.dq[at] = s * entering * inner(x.d_o + i * V, x.h + k * V, V);
      x.dkx[at] = leaving * inner(x.v_new + i * V, x.dh + k * V, V);
      const double Y = -inner(x.R + i * V, x.h + k * V, V);
      x.dbeta[i] += Y * x.k[at] * entering;
      x.Y[at] = x.beta[i] * entering * Y;
    }
  }
}

/// The state and WY terms of (5.33), already summed over the tokens.
void wy_gate(const Run& run, const Chunk& chunk, WyScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  for (int64_t k = 0; k < K; ++k) {
    const double decay = std::exp2(x.gamma[(chunk.n - 1) * K + k]);
    double before = decay * inner(x.h + k * V, x.dh + k * V, V);
    for (int64_t i = 0; i < chunk.n; ++i) {
      x.dg[i * K + k] = before;
      before += x.k[i * K + k] * x.dkx[i * K + k];
    }
    double after = 0;
    for (int64_t i = chunk.n - 1; i >= 0; --i) {
      const int64_t at = i * K + k;
      after += x.q[at] * x.dq[at] + x.k[at] * x.Y[at];
      x.dg[at] += after;
    }
  }
}

/// factor tril(x y^T, diagonal) in rows of C; zero elsewhere.
void lower_product(double factor, const double* x, const double* y, int64_t diagonal, int64_t n,
                   int64_t C, int64_t V, double* out) {
  std::fill_n(out, C * C, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i + diagonal; ++j) {
      out[i * C + j] = factor * inner(x + i * V, y + j * V, V);
    }
  }
}

void wy_chunk(const Run& run, const Preprocess& inputs, const Chunk& chunk, int64_t head,
              WyScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const int64_t C = run.problem.chunk_size;
  load_wy(run, inputs, chunk, head, x);
  wy_rows(run, chunk, x);
  wy_gate(run, chunk, x);
  lower_product(run.problem.effective_scale(), x.d_o, x.v_new, 0, chunk.n, C, V, x.scores);
  store_chunk(run.view(TensorId::kDP), chunk, head, C, x.scores);  // (5.2)
  lower_product(-1, x.R, x.v_new, -1, chunk.n, C, V, x.scores);
  store_chunk(run.view(TensorId::kDL), chunk, head, C, x.scores);  // (5.28)
  store_chunk(run.view(TensorId::kDqPartial), chunk, head, K, x.dq);
  store_chunk(run.view(TensorId::kDgPartial), chunk, head, K, x.dg);
  store_chunk(run.view(TensorId::kDbetaPartial), chunk, head, 1, x.dbeta);
  for (int64_t at = 0; at < chunk.n * K; ++at) x.dkx[at] += x.Y[at];  // (5.13)
  store_chunk(run.view(TensorId::kDkPartial), chunk, head, K, x.dkx);
  for (int64_t at = 0; at < chunk.n * V; ++at) x.R[at] *= x.beta[at / V];  // (5.11)
  store_chunk(run.view(TensorId::kDv), chunk, head, V, x.R);
}

void load_intra(const Run& run, const Preprocess& inputs, const Chunk& chunk, int64_t head,
                IntraScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t C = run.problem.chunk_size;
  for (int64_t i = 0; i < chunk.n; ++i) {
    const Position at{chunk.batch, chunk.begin + i, head};
    inputs.query(at, x.q + i * K);
    inputs.key(at, x.k + i * K);
    x.beta[i] = inputs.beta(at);
  }
  load_chunk(run.view(TensorId::kGamma), chunk, head, K, x.gamma);
  load_chunk(run.view(TensorId::kDP), chunk, head, C, x.dP);
  load_chunk(run.view(TensorId::kDL), chunk, head, C, x.dL);
}

/// (5.19), (5.20), (5.23) without the diagonal of dP, as (5.32) has it.
void intra_pairs(const Chunk& chunk, int64_t K, int64_t C, IntraScratch& x) {
  for (double* sum : {x.dq2, x.z, x.dkc}) std::fill_n(sum, chunk.n * K, 0.0);
  for (int64_t i = 0; i < chunk.n; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      const double dP = x.dP[i * C + j];
      const double dL = x.dL[i * C + j];
      for (int64_t k = 0; k < K; ++k) {
        const double E = std::exp2(x.gamma[i * K + k] - x.gamma[j * K + k]);
        x.dq2[i * K + k] += dP * x.k[j * K + k] * E;
        x.z[i * K + k] += dL * x.k[j * K + k] * E;
        x.dkc[j * K + k] += (dP * x.q[i * K + k] + dL * x.beta[i] * x.k[i * K + k]) * E;
      }
    }
  }
}

/// Adds this value head's dq and dk to those of its group: (5.24), with the diagonal of dP.
void add_query_and_key(const Run& run, const Chunk& chunk, int64_t head, IntraScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t C = run.problem.chunk_size;
  const auto add = [&](const View& partial, double* sum, auto&& term) {
    std::fill_n(x.partial, chunk.n * K, 0.0);
    if (partial) load_chunk(partial, chunk, head, K, x.partial);
    for (int64_t i = 0; i < chunk.n; ++i) {
      for (int64_t at = i * K; at < (i + 1) * K; ++at) {
        sum[at] += x.partial[at] + term(i, at, x.dP[i * C + i]);
      }
    }
  };
  add(run.view(TensorId::kDqPartial), x.dq,
      [&](int64_t, int64_t at, double d) { return x.dq2[at] + d * x.k[at]; });
  add(run.view(TensorId::kDkPartial), x.dk, [&](int64_t i, int64_t at, double d) {
    return x.beta[i] * x.z[at] + x.dkc[at] + d * x.q[at];
  });
}

/// (5.21), and (5.25)-(5.26) in the form of (5.33).
void store_beta_and_gate(const Run& run, const Chunk& chunk, int64_t head, IntraScratch& x) {
  const int64_t K = run.problem.sizes.K;
  if (const View dbeta = run.view(TensorId::kDbeta)) {
    const View partial = run.view(TensorId::kDbetaPartial);
    for (int64_t i = 0; i < chunk.n; ++i) {
      double sum = inner(x.z + i * K, x.k + i * K, K);
      if (partial) {
        sum += load_element(partial.at(chunk.batch, chunk.begin + i, head), partial.dtype);
      }
      store_element(dbeta.at(chunk.batch, chunk.begin + i, head), dbeta.dtype, sum);
    }
  }
  const View dg = run.view(TensorId::kDg);
  if (!dg) return;
  std::fill_n(x.partial, chunk.n * K, 0.0);
  if (const View partial = run.view(TensorId::kDgPartial)) {
    load_chunk(partial, chunk, head, K, x.partial);
  }
  for (int64_t k = 0; k < K; ++k) {
    double after = 0;
    for (int64_t i = chunk.n - 1; i >= 0; --i) {
      const int64_t at = i * K + k;
      after += x.q[at] * x.dq2[at] + x.k[at] * (x.beta[i] * x.z[at] - x.dkc[at]);
      x.partial[at] += after;
    }
  }
  store_chunk(dg, chunk, head, K, x.partial);
}

}  // namespace

int64_t reverse_scan_scratch(const Problem& problem) { return doubles_of<ReverseScratch>(problem); }

Status reverse_scan(const Run& run) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const int64_t C = run.problem.chunk_size;
  for_sequences(run, run.problem.sizes.HV,
                [&](const Sequence& sequence, int64_t head, Carver carver) {
                  ReverseScratch x(run.problem, carver);
                  load_state(run.state(TensorId::kDfinalState), sequence.index, head, K, V, x.D);
                  for (int64_t c = chunks_of(sequence, C) - 1; c >= 0; --c) {
                    reverse_chunk(run, chunk_of(sequence, c, C), head, x);
                  }
                  store_state(run.state(TensorId::kDinitialState), sequence.index, head, K, V, x.D);
                });
  return {};
}

int64_t wy_backward_scratch(const Problem& problem) { return doubles_of<WyScratch>(problem); }

Status wy_backward(const Run& run) {
  const Preprocess inputs(run.problem, run.args);
  for_chunks(run, run.problem.sizes.HV, [&](const Chunk& chunk, int64_t head, Carver carver) {
    WyScratch x(run.problem, carver);
    wy_chunk(run, inputs, chunk, head, x);
  });
  return {};
}

int64_t intra_backward_scratch(const Problem& problem) { return doubles_of<IntraScratch>(problem); }

Status intra_backward(const Run& run) {
  const Preprocess inputs(run.problem, run.args);
  const int64_t K = run.problem.sizes.K;
  const int64_t group = run.problem.sizes.HV / run.problem.sizes.H;
  for_chunks(run, run.problem.sizes.H, [&](const Chunk& chunk, int64_t h, Carver carver) {
    IntraScratch x(run.problem, carver);
    std::fill_n(x.dq, chunk.n * K, 0.0);
    std::fill_n(x.dk, chunk.n * K, 0.0);
    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      load_intra(run, inputs, chunk, head, x);
      intra_pairs(chunk, K, run.problem.chunk_size, x);
      add_query_and_key(run, chunk, head, x);
      store_beta_and_gate(run, chunk, head, x);
    }
    store_chunk(run.view(TensorId::kDq), chunk, h, K, x.dq);
    store_chunk(run.view(TensorId::kDk), chunk, h, K, x.dk);
  });
  return {};
}

}  // namespace kda::reference
