// What is asked: an operation, its sizes, options and the tensors that take part.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>

#include "kda/status.h"
#include "kda/types.h"

namespace kda {

/// Sizes of a problem, in elements.
struct Sizes {
  int64_t B = 1;   ///< Batch rows. Must be 1 for packed input.
  int64_t T = 0;   ///< Tokens per batch row; with cu_seqlens the packed capacity.
  int64_t H = 1;   ///< Query and key heads.
  int64_t HV = 1;  ///< Value heads, a multiple of H; head hv reads q, k of head hv / (HV / H).
  int64_t K = 0;   ///< Head dim of q, k, g: 1..256.
  int64_t V = 0;   ///< Head dim of v, o: 1 or more.
  int64_t N = 0;   ///< Packed sequences, len(cu_seqlens) - 1: at least 1 where T is not 0. Ignored
                   ///< without cu_seqlens.
  int64_t P = 0;   ///< States in the pool. Ignored without state_indices.
};

/// Element type and placement of one tensor.
///
/// `rank` 0 means "the shape that the sizes give, contiguous, last index fastest". With a rank, the
/// shape is checked against the expected one and the strides (in elements, not negative) are used.
/// A stride of 0 repeats an input; outputs must not overlap themselves.
struct TensorLayout {
  DType dtype = DType::kNone;
  int32_t rank = 0;
  std::array<int64_t, 4> shape{};
  std::array<int64_t, 4> stride{};

  bool present() const { return dtype != DType::kNone; }
  /// A contiguous layout with an explicit shape.
  static TensorLayout contiguous(DType dtype, std::initializer_list<int64_t> shape);
  static TensorLayout strided(DType dtype, std::initializer_list<int64_t> shape,
                              std::initializer_list<int64_t> stride);
};

/// How an operation uses a tensor.
enum class Role : int32_t { kInput = 0, kOutput = 1 };

/// Which element types a tensor may have, and which one Problem::make gives it.
enum class DTypeRule : int32_t {
  kIo = 0,        ///< bf16, fp16, fp32 or fp64: the dtype of the problem.
  kSameAsQ = 1,   ///< The dtype of q.
  kFloatIo = 2,   ///< Any of the four; by default the dtype of the problem.
  kFloat = 3,     ///< Any of the four; by default fp32 (fp64 in an fp64 problem).
  kAccurate = 4,  ///< fp32 or fp64: values that 16 bits cannot hold (docs/semantics.md 6.3).
  kIndex = 5,     ///< int64 or int32; by default int64.
  kInt32 = 6,     ///< int32.
};

/// For people, for example "as q" or "int64 or int32".
std::string_view describe(DTypeRule rule);

/// One row of an operation's signature.
struct TensorSpec {
  TensorId id;
  Role role;
  bool required;           ///< Optional inputs count as zero, optional outputs are not computed.
  std::string_view shape;  ///< "[B,T,H,K]": sizes, C = chunk_size, NC = chunk rows, S = states.
  DTypeRule dtypes;
  std::string_view about;  ///< One phrase.
};

/// The tensors of an operation in the order of its formulae. This table drives validation, the
/// program, the tests and the documentation.
std::span<const TensorSpec> tensors_of(Operation operation);

/// A request. Fill the fields, then hand it to make_plan.
///
///   auto problem = kda::Problem::make(kda::Operation::kChunkForward,
///                                     {.B = 1, .T = 4096, .H = 4, .HV = 4, .K = 128, .V = 128},
///                                     kda::DType::kBF16);
///   problem.gate = kda::Gate::kSoftplus;
///   problem.set(kda::TensorId::kALog, kda::DType::kF32);
struct Problem {
  Operation operation = Operation::kChunkForward;
  Sizes sizes;
  std::optional<double> scale;  ///< Attention scale s; K^-0.5 if absent.
  Gate gate = Gate::kNone;
  double lower_bound = 0;         ///< Natural-log decay per token, < 0; only for Gate::kLowerBound.
  bool qk_l2norm = false;         ///< Normalise q and k over K inside: (3.1)-(3.3), eps 1e-6.
  bool beta_sigmoid = false;      ///< beta holds logits: (3.12).
  bool allow_neg_eigval = false;  ///< beta = 2 sigmoid(logit); needs beta_sigmoid.
  bool state_v_first = false;     ///< States are [..., V, K] instead of [..., K, V].
  int32_t chunk_size = 64;        ///< C: 64 or 32.
  std::array<TensorLayout, kTensorCount> tensors{};

  /// A problem whose required tensors are present: q-like tensors in `io`, g and beta in fp32 (fp64
  /// with fp64 io), stage partials and gamma likewise, everything contiguous.
  static Problem make(Operation operation, const Sizes& sizes, DType io);

  /// Makes a tensor take part: an input is given, an output is wanted. kNone takes it out.
  Problem& set(TensorId id, DType dtype);
  Problem& set(TensorId id, const TensorLayout& layout);

  const TensorLayout& operator[](TensorId id) const {
    return tensors[static_cast<std::size_t>(id)];
  }
  bool has(TensorId id) const { return (*this)[id].present(); }
  bool packed() const { return has(TensorId::kCuSeqlens); }
  /// Number of sequences: N if packed, else B.
  int64_t sequences() const { return packed() ? sizes.N : sizes.B; }
  /// Rows of h and dh: B ceil(T/C), or the bound floor(T/C) + N if packed (see docs/semantics.md).
  int64_t chunk_rows() const;
  double effective_scale() const;

  /// The shape that sizes and options give a tensor; rank 0 if the operation has no such tensor.
  TensorLayout canonical_layout(TensorId id) const;
  /// Bytes from the first to the last element of a present tensor, strides counted; 0 if absent.
  int64_t bytes(TensorId id) const;

  /// Checks everything that does not depend on the device or on tensor contents and returns the
  /// problem with every present tensor's rank, shape and strides filled in. kInvalidArgument names
  /// the argument, what was found and what was expected.
  Result<Problem> validated() const;
};

}  // namespace kda
