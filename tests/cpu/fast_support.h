// Cases and comparisons for the tests of the fast CPU family.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "reference_support.h"

namespace kda {

/// One problem in few words; the rest is random.
struct FastCase {
  const char* name;
  Sizes sizes;
  DType io = DType::kF32;
  Gate gate = Gate::kNone;
  bool activations = false;  ///< l2norm, beta sigmoid, doubled
  bool state = true;         ///< initial_state (and dfinal_state)
  bool v_first = false;
  int32_t chunk_size = 64;
  std::vector<int64_t> lengths{};  ///< packed if not empty

  friend std::ostream& operator<<(std::ostream& out, const FastCase& c) { return out << c.name; }
};

/// The problem with inputs in the dtypes of the case and no output.
Problem problem_of(const FastCase& c, Operation operation);
/// The inputs, cu_seqlens included.
Tensors inputs_of(const FastCase& c, const Problem& problem, unsigned seed);
/// Asks for every output in this dtype; the checkpoints h, Aqk and A too.
Problem& want_all_in(Problem& problem, DType dtype);

/// Runs the fast family on fp32 outputs.
Tensors run_fast(Problem problem, const Tensors& inputs, int32_t threads = 0);
/// Runs the reference on the same rounded inputs, fp64 outputs.
Tensors run_reference(Problem problem, const Tensors& inputs);

/// RMS(reference - x) / (RMS(reference) + 1e-8), (7.1).
double rms_ratio(const Values& reference, const Values& x);
/// The fp32 limit of docs/semantics.md 7.3.
double limit_of(TensorId id);
/// Holds every output to its limit.
void expect_close(const Tensors& reference, const Tensors& x);
/// Every output bit for bit.
void expect_equal(const Tensors& a, const Tensors& b);

}  // namespace kda
