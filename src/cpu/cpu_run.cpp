#include "cpu/cpu_run.h"

#include <algorithm>
#include <utility>

namespace kda::cpu {

namespace {

bool has_values(Operation operation) {
  const auto specs = tensors_of(operation);
  return std::any_of(specs.begin(), specs.end(),
                     [](const TensorSpec& spec) { return spec.shape.ends_with(",V]"); });
}

}  // namespace

Dims::Dims(const Problem& problem)
    : C(problem.chunk_size),
      K(problem.sizes.K),
      V(has_values(problem.operation) ? problem.sizes.V : 0),
      G(problem.sizes.HV / problem.sizes.H),
      Kp(padded(K)),
      Vp(padded(V)),
      ldk(leading(K)),
      ldv(leading(V)),
      ldc(leading(C)) {}

Run::Run(const Problem& problem_, const Args& args, SequenceList list_)
    : problem(problem_),
      list(std::move(list_)),
      dims(problem_),
      scale(static_cast<float>(problem_.effective_scale())) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const bool state = spec.shape == "[S,HV,K,V]";
    views[static_cast<std::size_t>(spec.id)] =
        state ? state_view_of(problem, args, spec.id) : view_of(problem, args, spec.id);
  }
}

Rows Run::tokens(TensorId id, const Chunk& chunk, int64_t head) const {
  const View& view = (*this)[id];
  if (!view) return {};
  return {view.at(chunk.batch, chunk.begin, head), view.dtype, view.stride[1], view.stride[3]};
}

Rows Run::state(TensorId id, int64_t index, int64_t head) const {
  const View& view = (*this)[id];
  if (!view) return {};
  return {view.at(index, head), view.dtype, view.stride[2], view.stride[3]};
}

Rows Run::head_row(TensorId id, int64_t head) const {
  const View& view = (*this)[id];
  if (!view) return {};
  return {view.at(head), view.dtype, 0, view.stride[1]};
}

int64_t Run::chunk_count(int64_t sequence) const {
  return (list.sequences[static_cast<std::size_t>(sequence)].length() + dims.C - 1) / dims.C;
}

Chunk Run::chunk(int64_t sequence, int64_t c) const {
  const Sequence& s = list.sequences[static_cast<std::size_t>(sequence)];
  const int64_t begin = s.begin + c * dims.C;
  return {s.batch, begin, std::min(dims.C, s.end - begin), s.first_chunk + c, s.index};
}

ChunkTiles::ChunkTiles(const Dims& dims, Arena& arena) {
  for (float** tile : {&q, &k, &decay, &pc, &sc}) *tile = arena.take(dims.C * dims.ldk);
  v = arena.take(dims.C * dims.ldv);
  for (float** column : {&beta, &rq, &rk}) *column = arena.take(dims.C);
  for (float** row : {&rest, &bias}) *row = arena.take(dims.Kp);
}

IntraTiles::IntraTiles(const Dims& dims, Arena& arena) {
  for (float** tile : {&a, &b, &c}) *tile = arena.take(dims.C * dims.ldk);
  t = arena.take(std::max(dims.Kp, dims.C) * dims.ldc);
  total = arena.take(dims.C / kBlock * dims.ldk);
}

}  // namespace kda::cpu
