#include "cuda/hopper_case.h"

#include <fmt/format.h>

#include "check.h"
#include "compare.h"
#include "cuda/device_case.h"

namespace kda::test {

using cases::Case;
using cases::HostTensor;
using cases::TensorMap;

Conditions on_row(std::string_view row) {
  Conditions conditions;
  conditions.options = choosing(row);
  conditions.device = {DeviceType::kCuda, 0};
  conditions.repeat = true;
  return conditions;
}

std::string beyond(const Limit& limit, const Case& c, const TensorMap& results,
                   const TensorMap& expected) {
  std::string text;
  for (const auto& [id, reference] : expected) {
    // Blocks of h are one (chunk row, head), as those of states are.
    const TensorId as = id == TensorId::kH       ? TensorId::kFinalState
                        : id == TensorId::kDqRaw ? TensorId::kDq
                                                 : id;
    const cases::Difference d = cases::compare(c, as, results.at(id), reference);
    const double most = limit(id, reference);
    if (d.finite && d.ratio <= most && d.block_ratio <= cases::kBlockFactor * most) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}{}; ", name_of(id),
                        d.ratio, d.block_ratio, most, d.finite ? "" : ", not finite");
  }
  return text;
}

Limit limits_beside_rounding(const Case& c, DType io) {
  return [&c, io, emulated = cases::emulated_rounding(c, io)](TensorId id,
                                                              const HostTensor& reference) {
    return cases::limit_beside(emulated, c, id, reference, io);
  };
}

HostTensor part_of(const HostTensor& t, std::size_t dim, int64_t begin, int64_t end) {
  HostTensor part(t.dtype, t.shape);
  part.shape[dim] = end - begin;
  auto row = static_cast<std::ptrdiff_t>(size_of(t.dtype));
  for (std::size_t i = dim + 1; i < t.shape.size(); ++i) row *= t.shape[i];
  part.bytes.assign(t.bytes.begin() + row * begin, t.bytes.begin() + row * end);
  for (std::size_t i = 0; i < dim; ++i) part.shape[i] = 1;
  return part;
}

}  // namespace kda::test
