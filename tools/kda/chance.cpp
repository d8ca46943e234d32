#include "chance.h"

#include <algorithm>
#include <cmath>

namespace kda::cases {
namespace {

/// Below so many numbers a ratio is a draw; the limit then is 1 + kSpread / sqrt(count) times as
/// large. An RMS of n normal errors passes its expectation by that factor once in a million.
constexpr int64_t kFewNumbers = 1024;
constexpr double kSpread = 4;

bool is_state(TensorId id) {
  return id == TensorId::kFinalState || id == TensorId::kDinitialState || id == TensorId::kH ||
         id == TensorId::kDh;
}

/// How many errors are apart from each other: those of one token and head are not, where the error
/// of one score multiplies a whole row.
int64_t independent(TensorId id, const HostTensor& expected) {
  const bool rows = !is_state(id) && expected.shape.size() == 4;
  return std::max<int64_t>(expected.count() / (rows ? expected.shape[3] : 1), 1);
}

}  // namespace

double rms(const HostTensor& tensor) {
  double sum = 0;
  for (int64_t i = 0; i < tensor.count(); ++i) sum += tensor.get(i) * tensor.get(i);
  return tensor.count() == 0 ? 0 : std::sqrt(sum / static_cast<double>(tensor.count()));
}

bool is_a_draw(TensorId id, const HostTensor& expected) {
  return independent(id, expected) < kFewNumbers || id == TensorId::kDALog ||
         id == TensorId::kDdtBias;
}

void allow_for_chance(TensorId id, const HostTensor& expected, double usual_rms, Difference& d,
                      double& limit) {
  const double usual = (usual_rms + kLeastRms) / (rms(expected) + kLeastRms);
  d.ratio /= std::max(1.0, usual);
  d.block_ratio /= std::max(1.0, usual);
  limit *= 1 + kSpread / std::sqrt(static_cast<double>(independent(id, expected)));
}

}  // namespace kda::cases
