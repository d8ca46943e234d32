// Which tokens belong to which sequence, read from host memory (CPU implementations only).
#pragma once

#include <cstdint>
#include <vector>

#include "kda/plan.h"
#include "kda/problem.h"
#include "kda/status.h"

namespace kda {

/// Tokens [begin, end) of batch row `batch`; its chunks are rows first_chunk.. of h and dh.
struct Sequence {
  int64_t index;  ///< row of the states
  int64_t batch;
  int64_t begin;
  int64_t end;
  int64_t first_chunk;

  int64_t length() const { return end - begin; }
};

struct SequenceList {
  std::vector<Sequence> sequences;  ///< none where T = 0 and no tensor has a row for each
  int64_t chunk_rows_used = 0;      ///< rows of h and dh that belong to a chunk
  int64_t tokens_used = 0;          ///< T, or cu_seqlens[N]: rows from here on are padding
};

/// Fixed-length rows, or cu_seqlens checked: kInvalidArgument names the first wrong entry.
Result<SequenceList> read_sequences(const Problem& problem, const Args& args);

/// Whether sequences with so many tokens together have something to write: a token or a state. All
/// other outputs are zero without a token, however many heads and sequences there are.
bool has_work(const Problem& problem, int64_t tokens);

}  // namespace kda
