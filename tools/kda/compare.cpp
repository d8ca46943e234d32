#include "compare.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kda::cases {
namespace {

/// The larger one; NaN if either is, unlike std::max.
double worst(double a, double b) { return std::isnan(a) || a > b ? a : b; }

struct Sums {
  double error2 = 0;
  double reference2 = 0;
  int64_t count = 0;

  void add(const Sums& other) {
    error2 += other.error2;
    reference2 += other.reference2;
    count += other.count;
  }
  double error_rms() const { return count == 0 ? 0 : std::sqrt(error2 / double(count)); }
  double reference_rms() const { return count == 0 ? 0 : std::sqrt(reference2 / double(count)); }
};

struct Accumulator {
  const HostTensor& result;
  const HostTensor& expected;
  ShortBlocks short_blocks;
  Sums whole;
  std::vector<Sums> blocks;
  Sums pool;  ///< blocks that are too small to stand alone
  int64_t pooled = 0;
  double max_error = 0;
  double max_reference = 0;
  bool finite = true;

  /// Elements [begin, begin + count) belong to the block.
  void add(Sums& block, int64_t begin, int64_t count) {
    for (int64_t i = begin; i < begin + count; ++i) {
      const double value = result.get(i);
      const double reference = expected.get(i);
      const double error = value - reference;
      finite = finite && std::isfinite(value) && std::isfinite(reference);
      block.error2 += error * error;
      block.reference2 += reference * reference;
      max_error = worst(max_error, std::fabs(error));
      max_reference = worst(max_reference, std::fabs(reference));
    }
    block.count += count;
  }

  /// `numbers`: those whose errors are apart from each other.
  void close(const Sums& block, int64_t numbers) {
    whole.add(block);
    pool.add(block);
    pooled += numbers;
    if (short_blocks == ShortBlocks::kPooled && pooled < kBlockTokens) return;
    blocks.push_back(std::exchange(pool, {}));
    pooled = 0;
  }

  /// Those left in the pool go with the last block.
  void finish() {
    if (pool.count == 0) return;
    if (blocks.empty()) {
      blocks.push_back(pool);
    } else {
      blocks.back().add(pool);
    }
    pool = {};
    pooled = 0;
  }

  Difference difference() const {
    Difference d;
    d.finite = finite;
    d.ratio = whole.error_rms() / (whole.reference_rms() + 1e-8);
    d.max_error = max_reference == 0 ? max_error : max_error / max_reference;
    for (const Sums& block : blocks) {
      const double scale = worst(block.reference_rms(), kBlockFloor * whole.reference_rms()) + 1e-8;
      d.block_ratio = worst(d.block_ratio, block.error_rms() / scale);
    }
    return d;
  }
};

bool is_state(TensorId id) { return id == TensorId::kFinalState || id == TensorId::kDinitialState; }

bool is_parameter(TensorId id) { return id == TensorId::kDALog || id == TensorId::kDdtBias; }

/// Adds the tokens of one range, 64 at a time, each head for itself; `alone`: short blocks stand
/// too.
void add_tokens(Accumulator& all, const TokenRange& range, bool alone = false) {
  const std::vector<int64_t>& shape = all.expected.shape;
  const int64_t T = shape[1];
  const int64_t heads = shape[2];
  const int64_t width = shape.size() > 3 ? shape[3] : 1;
  for (int64_t begin = range.begin; begin < range.end; begin += kBlockTokens) {
    const int64_t end = std::min(begin + kBlockTokens, range.end);
    for (int64_t head = 0; head < heads; ++head) {
      Sums block;
      for (int64_t t = begin; t < end; ++t) {
        all.add(block, ((range.batch * T + t) * heads + head) * width, width);
      }
      all.close(block, alone ? kBlockTokens : end - begin);
    }
  }
}

}  // namespace

Difference compare(const Case& c, TensorId id, const HostTensor& result, const HostTensor& expected,
                   ShortBlocks short_blocks) {
  Accumulator all{result, expected, short_blocks, {}, {}, {}, 0, 0, 0, true};
  const int64_t count = expected.count();
  if (is_state(id)) {
    const int64_t size = expected.shape[2] * expected.shape[3];
    for (int64_t begin = 0; begin < count; begin += size) {
      Sums block;
      all.add(block, begin, size);
      all.close(block, block.count);
    }
  } else if (is_parameter(id)) {
    Sums block;
    all.add(block, 0, count);
    all.close(block, block.count);
  } else {
    const std::vector<TokenRange> sequences = sequences_of(c);
    for (const TokenRange& range : sequences) add_tokens(all, range);
    if (c.forward.packed()) {
      all.finish();
      add_tokens(all, {0, sequences.empty() ? 0 : sequences.back().end, c.forward.sizes.T}, true);
    }
  }
  all.finish();
  return all.difference();
}

Precision precision_of(DType io) {
  switch (io) {
    case DType::kBF16:
      return Precision::kBF16;
    case DType::kF16:
      return Precision::kF16;
    case DType::kF64:
      return Precision::kF64;
    default:
      return Precision::kF32;
  }
}

double limit_of(Precision precision, TensorId id) {
  struct Row {
    double state_or_o, dqkv, dg, dbeta, dA_log, ddt_bias;
  };
  constexpr Row kF32Row{1e-5, 1e-5, 3e-5, 1e-5, 2e-4, 3e-4};
  constexpr Row kBF16Row{5e-3, 6e-3, 1e-2, 8e-3, 1e-2, 8e-3};
  constexpr Row kF16Row{1e-3, 1e-3, 3e-3, 1e-3, 3e-3, 2e-3};
  if (precision == Precision::kF64) return 1e-12;
  const Row& row = precision == Precision::kF32   ? kF32Row
                   : precision == Precision::kF16 ? kF16Row
                                                  : kBF16Row;
  switch (id) {
    case TensorId::kDq:
    case TensorId::kDk:
    case TensorId::kDv:
      return row.dqkv;
    case TensorId::kDg:
      return row.dg;
    case TensorId::kDbeta:
      return row.dbeta;
    case TensorId::kDALog:
      return row.dA_log;
    case TensorId::kDdtBias:
      return row.ddt_bias;
    default:
      return row.state_or_o;
  }
}

}  // namespace kda::cases
