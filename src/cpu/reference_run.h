// How the operations of the float64 reference family share work, memory and loops.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "core/sequences.h"
#include "core/view.h"
#include "cpu/element.h"
#include "kda/plan.h"
#include "kda/problem.h"

namespace kda::reference {

/// Hands out arrays of doubles from a workspace; without one it only counts them.
class Carver {
 public:
  /// Counts stop here, so that sizes no machine has do not overflow.
  static constexpr int64_t kMost = int64_t{1} << 50;

  explicit Carver(double* base = nullptr) : base_(base) {}

  template <class... Extents>
  double* take(Extents... extents) {
    int64_t count = 1;
    for (const int64_t extent : {static_cast<int64_t>(extents)...}) {
      count = extent == 0 ? 0 : count > kMost / extent ? kMost : count * extent;
    }
    double* array = base_ != nullptr ? base_ + used_ : nullptr;
    used_ = std::min(used_ + count, kMost);
    return array;
  }

  int64_t used() const { return used_; }

 private:
  double* base_;
  int64_t used_ = 0;
};

/// Doubles that a struct of scratch arrays takes.
template <class Scratch>
int64_t doubles_of(const Problem& problem) {
  Carver counter;
  Scratch(problem, counter);
  return counter.used();
}

/// One run of an operation. Every thread has scratch of its own; `shared` outlives the loops.
struct Run {
  const Problem& problem;
  const Args& args;
  const SequenceList& list;
  int threads;
  double* shared;
  double* scratch;
  int64_t scratch_doubles;

  View view(TensorId id) const { return view_of(problem, args, id); }
  View state(TensorId id) const { return state_view_of(problem, args, id); }
  Carver thread_scratch() const { return Carver(scratch + omp_get_thread_num() * scratch_doubles); }
};

/// Rows [begin, begin + n) of batch row `batch`, all of one chunk. `row` indexes h and dh.
struct Chunk {
  int64_t sequence;
  int64_t batch;
  int64_t begin;
  int64_t n;
  int64_t row;
};

inline Chunk chunk_of(const Sequence& sequence, int64_t c, int64_t C) {
  const int64_t begin = sequence.begin + c * C;
  return {sequence.index, sequence.batch, begin, std::min(C, sequence.end - begin),
          sequence.first_chunk + c};
}

inline int64_t chunks_of(const Sequence& sequence, int64_t C) {
  return (sequence.length() + C - 1) / C;
}

/// body(sequence, head, scratch) for every sequence and head, in parallel, if any has something to
/// write.
template <class Body>
void for_sequences(const Run& run, int64_t heads, const Body& body) {
  if (!has_work(run.problem, run.list.tokens_used)) return;
  const int64_t tasks = static_cast<int64_t>(run.list.sequences.size()) * heads;
#pragma omp parallel for num_threads(run.threads) schedule(dynamic)
  for (int64_t task = 0; task < tasks; ++task) {
    body(run.list.sequences[static_cast<std::size_t>(task / heads)], task % heads,
         run.thread_scratch());
  }
}

/// body(chunk, head, scratch) for every chunk and head, in parallel.
template <class Body>
void for_chunks(const Run& run, int64_t heads, const Body& body) {
  const int64_t tasks = run.list.chunk_rows_used * heads;
#pragma omp parallel for num_threads(run.threads) schedule(dynamic)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t row = task / heads;
    // The last sequence that starts at or before the row: empty ones share the row of the next.
    const auto after = std::upper_bound(
        run.list.sequences.begin(), run.list.sequences.end(), row,
        [](int64_t wanted, const Sequence& sequence) { return wanted < sequence.first_chunk; });
    const Sequence& sequence = *(after - 1);
    body(chunk_of(sequence, row - sequence.first_chunk, run.problem.chunk_size), task % heads,
         run.thread_scratch());
  }
}

/// The rows of a chunk and head of a [B,T,heads,width] tensor, as [n,width].
inline void load_chunk(const View& view, const Chunk& chunk, int64_t head, int64_t width,
                       double* out) {
  for (int64_t i = 0; i < chunk.n; ++i) {
    load_row(out + i * width, view.at(chunk.batch, chunk.begin + i, head), view.dtype, width,
             view.stride[3]);
  }
}

/// Does nothing if the tensor is not asked for.
inline void store_chunk(const View& view, const Chunk& chunk, int64_t head, int64_t width,
                        const double* in) {
  if (!view) return;
  for (int64_t i = 0; i < chunk.n; ++i) {
    store_row(view.at(chunk.batch, chunk.begin + i, head), view.dtype, in + i * width, width,
              view.stride[3]);
  }
}

/// A [K,V] matrix of a [rows,HV,K,V] tensor; zeros if the tensor is absent.
inline void load_state(const View& view, int64_t row, int64_t head, int64_t K, int64_t V,
                       double* S) {
  if (!view) {
    std::fill_n(S, K * V, 0.0);
    return;
  }
  for (int64_t k = 0; k < K; ++k) {
    load_row(S + k * V, view.at(row, head, k), view.dtype, V, view.stride[3]);
  }
}

/// Does nothing if the tensor is not asked for.
inline void store_state(const View& view, int64_t row, int64_t head, int64_t K, int64_t V,
                        const double* S) {
  if (!view) return;
  for (int64_t k = 0; k < K; ++k) {
    store_row(view.at(row, head, k), view.dtype, S + k * V, V, view.stride[3]);
  }
}

}  // namespace kda::reference
