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

void zero_parameters(const View& view, int64_t rank) {
  for (int64_t head = 0; head < view.shape[0]; ++head) {
    for (int64_t k = 0; k < (rank > 1 ? view.shape[1] : 1); ++k) {
      store_element(view.at(head, k), view.dtype, 0);
    }
  }
}

}  // namespace

void zero_padding(const Problem& problem, const Args& args, const SequenceList& list) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const View view = view_of(problem, args, spec.id);
    if (spec.role != Role::kOutput || !view) continue;
    const int32_t rank = problem[spec.id].rank;
    if (spec.shape.starts_with("[B,T,")) {
      if (list.tokens_used == view.shape[1]) continue;  // there may be no row in many batches
      for (int64_t b = 0; b < view.shape[0]; ++b) {
        for (int64_t t = list.tokens_used; t < view.shape[1]; ++t) zero_row(view, b, t, rank);
      }
    } else if (spec.shape.starts_with("[HV") && !has_work(problem, list.tokens_used)) {
      zero_parameters(view, rank);
    } else if (spec.shape.starts_with("[NC,")) {
      for (int64_t row = list.chunk_rows_used; row < view.shape[0]; ++row) {
        for (int64_t head = 0; head < view.shape[1]; ++head) zero_row(view, row, head, rank);
      }
    }
  }
}

}  // namespace kda
