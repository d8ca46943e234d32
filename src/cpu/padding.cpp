#include "cpu/padding.h"

#include "core/view.h"
#include "cpu/element.h"

namespace kda {
namespace {

void zero_row(const View& view, int64_t i, int64_t j, int32_t rank) {
  const int64_t heads = view.shape[2];
  const int64_t width = rank > 3 ? view.shape[3] : 1;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t x = 0; x < width; ++x) {
      store_element(view.at(i, j, head, x), view.dtype, 0);
    }
  }
}

}  // namespace

void zero_padding(const Problem& problem, const Args& args, const SequenceList& list) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const View view = view_of(problem, args, spec.id);
    if (spec.role != Role::kOutput || !view) continue;
    const int32_t rank = problem[spec.id].rank;
    if (spec.shape.substr(0, 5) == "[B,T,") {
      for (int64_t b = 0; b < view.shape[0]; ++b) {
        for (int64_t t = list.tokens_used; t < view.shape[1]; ++t) zero_row(view, b, t, rank);
      }
    } else if (spec.shape.substr(0, 4) == "[NC,") {
      for (int64_t row = list.chunk_rows_used; row < view.shape[0]; ++row) {
        for (int64_t head = 0; head < view.shape[1]; ++head) zero_row(view, row, head, rank);
      }
    }
  }
}

}  // namespace kda
