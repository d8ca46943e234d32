// What kernels take by value: plain structs, 64-bit strides and offsets.
#pragma once

#include <cstdint>

namespace kda::cuda {

/// A tensor on the device. `data` is null if the tensor is absent.
struct Tensor {
  void* data = nullptr;
  int64_t stride[4] = {};  ///< in elements
  int32_t dtype = 0;       ///< value of kda::DType
};

/// One chunk of a packed problem. rows == 0: the row of h and dh is unused.
struct ChunkEntry {
  int64_t sequence;
  int64_t begin;  ///< first token
  int64_t rows;
};

/// Which tokens belong to which sequence. cu_seqlens stays on the device: with packed input
/// `offsets` and `entries` lie in the workspace and are filled by the kernels of chunk_table.h,
/// which clamp every value, so that wrong cu_seqlens give wrong results but no access out of
/// bounds.
struct Sequences {
  Tensor cu;  ///< absent: fixed length
  int64_t* offsets = nullptr;
  ChunkEntry* entries = nullptr;
  int64_t count = 0;
  int64_t T = 0;
  int64_t chunk_rows = 0;
  int64_t chunks_per_row = 0;  ///< fixed length only
  int32_t C = 64;
};

/// How g becomes the natural-log decay.
struct GateParams {
  Tensor g;
  Tensor A_log;
  Tensor dt_bias;
  int32_t kind = 0;  ///< value of kda::Gate
  double lower_bound = 0;
  double log_bound = 0;  ///< log(-lower_bound) if there is one
};

/// Heads and head sizes.
struct Heads {
  int64_t H = 1;
  int64_t HV = 1;
  int64_t group = 1;  ///< value heads of a key head: HV / H
  int64_t V = 0;
  int32_t K = 0;
};

}  // namespace kda::cuda
