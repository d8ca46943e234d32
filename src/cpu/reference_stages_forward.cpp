// The stages of the forward, each straight from its formula: section 4 of docs/semantics.md.
#include <algorithm>
#include <cmath>

#include "cpu/reference_operations.h"
#include "cpu/reference_preprocess.h"
#include "cpu/reference_scores.h"

namespace kda::reference {
namespace {

struct GateScratch {
  GateScratch(const Problem& problem, Carver& carver)
      : gamma(carver.take(problem.chunk_size, problem.sizes.K)) {}

  double* gamma;  // [C,K]
};

struct WuScratch {
  WuScratch(const Problem& problem, Carver& carver)
      : gamma(carver.take(problem.chunk_size, problem.sizes.K)),
        rows(carver.take(problem.chunk_size, std::max(problem.sizes.K, problem.sizes.V))),
        product(carver.take(problem.chunk_size, std::max(problem.sizes.K, problem.sizes.V))),
        A(carver.take(problem.chunk_size, problem.chunk_size)) {}

  double* gamma;    // [C,K]
  double* rows;     // [C,K] or [C,V]
  double* product;  // as rows
  double* A;        // [C,C]
};

struct ScanScratch {
  ScanScratch(const Problem& problem, Carver& carver)
      : h(carver.take(problem.sizes.K, problem.sizes.V)),
        gamma(carver.take(problem.chunk_size, problem.sizes.K)),
        kg(carver.take(problem.chunk_size, problem.sizes.K)),
        w(carver.take(problem.chunk_size, problem.sizes.K)),
        v_new(carver.take(problem.chunk_size, problem.sizes.V)),
        d_o(carver.take(problem.chunk_size, problem.sizes.V)),
        dq_raw(carver.take(problem.chunk_size, problem.sizes.K)) {}

  double* h;       // [K,V]
  double* gamma;   // [C,K]
  double* kg;      // [C,K]
  double* w;       // [C,K]
  double* v_new;   // [C,V]
  double* d_o;     // [C,V]
  double* dq_raw;  // [C,K]
};

struct OutputScratch {
  OutputScratch(const Problem& problem, Carver& carver)
      : h(carver.take(problem.sizes.K, problem.sizes.V)),
        gamma(carver.take(problem.chunk_size, problem.sizes.K)),
        q(carver.take(problem.chunk_size, problem.sizes.K)),
        Aqk(carver.take(problem.chunk_size, problem.chunk_size)),
        v_new(carver.take(problem.chunk_size, problem.sizes.V)),
        o(carver.take(problem.chunk_size, problem.sizes.V)) {}

  double* h;      // [K,V]
  double* gamma;  // [C,K]
  double* q;      // [C,K]
  double* Aqk;    // [C,C]
  double* v_new;  // [C,V]
  double* o;      // [C,V]
};

/// Rows of out are those of A x, with A lower triangular: (4.11), (4.12).
void multiply_lower(const double* A, int64_t C, const double* x, int64_t n, int64_t width,
                    double* out) {
  std::fill_n(out, n * width, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      for (int64_t c = 0; c < width; ++c) out[i * width + c] += A[i * C + j] * x[j * width + c];
    }
  }
}

void store_w_and_u(const Run& run, const Preprocess& inputs, const Chunk& chunk, int64_t head,
                   WuScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const int64_t C = run.problem.chunk_size;
  load_chunk(run.view(TensorId::kA), chunk, head, C, x.A);
  if (const View w = run.view(TensorId::kW)) {
    for (int64_t i = 0; i < chunk.n; ++i) {
      const Position at{chunk.batch, chunk.begin + i, head};
      const double beta = inputs.beta(at);
      inputs.key(at, x.rows + i * K);
      for (int64_t k = 0; k < K; ++k) x.rows[i * K + k] *= beta * std::exp2(x.gamma[i * K + k]);
    }
    multiply_lower(x.A, C, x.rows, chunk.n, K, x.product);
    store_chunk(w, chunk, head, K, x.product);
  }
  if (const View u = run.view(TensorId::kU)) {
    for (int64_t i = 0; i < chunk.n; ++i) {
      const Position at{chunk.batch, chunk.begin + i, head};
      const double beta = inputs.beta(at);
      inputs.value(at, x.rows + i * V);
      for (int64_t j = 0; j < V; ++j) x.rows[i * V + j] *= beta;
    }
    multiply_lower(x.A, C, x.rows, chunk.n, V, x.product);
    store_chunk(u, chunk, head, V, x.product);
  }
}

void store_kg_and_qg(const Run& run, const Preprocess& inputs, const Chunk& chunk, int64_t head,
                     WuScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const double* last = x.gamma + (chunk.n - 1) * K;  // (4.3)
  if (const View kg = run.view(TensorId::kKg)) {
    for (int64_t i = 0; i < chunk.n; ++i) {
      inputs.key({chunk.batch, chunk.begin + i, head}, x.rows + i * K);
      for (int64_t k = 0; k < K; ++k) {
        x.rows[i * K + k] *= std::exp2(last[k] - x.gamma[i * K + k]);  // (4.10)
      }
    }
    store_chunk(kg, chunk, head, K, x.rows);
  }
  if (const View qg = run.view(TensorId::kQg)) {
    for (int64_t i = 0; i < chunk.n; ++i) {
      inputs.query({chunk.batch, chunk.begin + i, head}, x.rows + i * K);
      for (int64_t k = 0; k < K; ++k) x.rows[i * K + k] *= std::exp2(x.gamma[i * K + k]);  // (4.9)
    }
    store_chunk(qg, chunk, head, K, x.rows);
  }
}

/// (5.1).
void store_raw_dq(const Run& run, const Chunk& chunk, int64_t head, ScanScratch& x) {
  const View dq_raw = run.view(TensorId::kDqRaw);
  if (!dq_raw) return;
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  load_chunk(run.view(TensorId::kDo), chunk, head, V, x.d_o);
  for (int64_t i = 0; i < chunk.n; ++i) {
    for (int64_t k = 0; k < K; ++k) {
      double sum = 0;
      for (int64_t j = 0; j < V; ++j) sum += x.d_o[i * V + j] * x.h[k * V + j];
      x.dq_raw[i * K + k] = sum;
    }
  }
  store_chunk(dq_raw, chunk, head, K, x.dq_raw);
}

/// (4.13)-(4.15) for one chunk.
void scan_chunk(const Run& run, const Chunk& chunk, int64_t head, ScanScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  store_state(run.view(TensorId::kH), chunk.row, head, K, V, x.h);
  store_raw_dq(run, chunk, head, x);
  load_chunk(run.view(TensorId::kGamma), chunk, head, K, x.gamma);
  load_chunk(run.view(TensorId::kKg), chunk, head, K, x.kg);
  load_chunk(run.view(TensorId::kW), chunk, head, K, x.w);
  load_chunk(run.view(TensorId::kU), chunk, head, V, x.v_new);
  for (int64_t i = 0; i < chunk.n; ++i) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t j = 0; j < V; ++j) x.v_new[i * V + j] -= x.w[i * K + k] * x.h[k * V + j];
    }
  }
  store_chunk(run.view(TensorId::kVNew), chunk, head, V, x.v_new);
  for (int64_t k = 0; k < K; ++k) {
    const double decay = std::exp2(x.gamma[(chunk.n - 1) * K + k]);
    for (int64_t j = 0; j < V; ++j) x.h[k * V + j] *= decay;
  }
  for (int64_t i = 0; i < chunk.n; ++i) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t j = 0; j < V; ++j) x.h[k * V + j] += x.kg[i * K + k] * x.v_new[i * V + j];
    }
  }
}

/// (4.17).
void output_chunk(const Run& run, const Preprocess& inputs, const Chunk& chunk, int64_t head,
                  OutputScratch& x) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const int64_t C = run.problem.chunk_size;
  const double s = run.problem.effective_scale();
  load_state(run.view(TensorId::kH), chunk.row, head, K, V, x.h);
  load_chunk(run.view(TensorId::kGamma), chunk, head, K, x.gamma);
  load_chunk(run.view(TensorId::kAqk), chunk, head, C, x.Aqk);
  load_chunk(run.view(TensorId::kVNew), chunk, head, V, x.v_new);
  multiply_lower(x.Aqk, C, x.v_new, chunk.n, V, x.o);
  for (int64_t i = 0; i < chunk.n; ++i) {
    inputs.query({chunk.batch, chunk.begin + i, head}, x.q + i * K);
    for (int64_t k = 0; k < K; ++k) {
      const double sqg = s * x.q[i * K + k] * std::exp2(x.gamma[i * K + k]);
      for (int64_t j = 0; j < V; ++j) x.o[i * V + j] += sqg * x.h[k * V + j];
    }
  }
  store_chunk(run.view(TensorId::kO), chunk, head, V, x.o);
}

}  // namespace

int64_t gate_cumsum_scratch(const Problem& problem) { return doubles_of<GateScratch>(problem); }

Status gate_cumsum(const Run& run) {
  const Preprocess inputs(run.problem, run.args);
  const int64_t K = run.problem.sizes.K;
  for_chunks(run, run.problem.sizes.HV, [&](const Chunk& chunk, int64_t head, Carver carver) {
    const GateScratch x(run.problem, carver);
    cumulative_gate(inputs, chunk, head, K, x.gamma);
    store_chunk(run.view(TensorId::kGamma), chunk, head, K, x.gamma);
  });
  return {};
}

int64_t intra_scratch(const Problem& problem) { return doubles_of<Scores>(problem); }

Status intra(const Run& run) {
  const Preprocess inputs(run.problem, run.args);
  for_chunks(run, run.problem.sizes.HV, [&](const Chunk& chunk, int64_t head, Carver carver) {
    Scores scores(run.problem, carver);
    load_chunk(run.view(TensorId::kGamma), chunk, head, scores.K, scores.gamma);
    scores.load(inputs, chunk, head);
    scores.compute(run.problem, chunk.n);
    scores.store(chunk, head, run.view(TensorId::kAqk), run.view(TensorId::kA));
  });
  return {};
}

int64_t wu_scratch(const Problem& problem) { return doubles_of<WuScratch>(problem); }

Status wu(const Run& run) {
  const Preprocess inputs(run.problem, run.args);
  const int64_t K = run.problem.sizes.K;
  for_chunks(run, run.problem.sizes.HV, [&](const Chunk& chunk, int64_t head, Carver carver) {
    WuScratch x(run.problem, carver);
    load_chunk(run.view(TensorId::kGamma), chunk, head, K, x.gamma);
    store_w_and_u(run, inputs, chunk, head, x);
    store_kg_and_qg(run, inputs, chunk, head, x);
  });
  return {};
}

int64_t state_scan_scratch(const Problem& problem) { return doubles_of<ScanScratch>(problem); }

Status state_scan(const Run& run) {
  const int64_t K = run.problem.sizes.K;
  const int64_t V = run.problem.sizes.V;
  const int64_t C = run.problem.chunk_size;
  for_sequences(run, run.problem.sizes.HV,
                [&](const Sequence& sequence, int64_t head, Carver carver) {
                  ScanScratch x(run.problem, carver);
                  load_state(run.state(TensorId::kInitialState), sequence.index, head, K, V, x.h);
                  for (int64_t c = 0; c < chunks_of(sequence, C); ++c) {
                    scan_chunk(run, chunk_of(sequence, c, C), head, x);
                  }
                  store_state(run.state(TensorId::kFinalState), sequence.index, head, K, V, x.h);
                });
  return {};
}

int64_t output_scratch(const Problem& problem) { return doubles_of<OutputScratch>(problem); }

Status output(const Run& run) {
  const Preprocess inputs(run.problem, run.args);
  for_chunks(run, run.problem.sizes.HV, [&](const Chunk& chunk, int64_t head, Carver carver) {
    OutputScratch x(run.problem, carver);
    output_chunk(run, inputs, chunk, head, x);
  });
  return {};
}

}  // namespace kda::reference
