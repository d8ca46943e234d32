#include "emulation.h"

#include <algorithm>
#include <vector>

#include "emulation_head.h"

namespace kda::cases {
namespace {

using enum TensorId;

class ForwardHead : public EmulatedHead {
 public:
  using EmulatedHead::EmulatedHead;

  /// Checkpoints go to rows `first` and following of h.
  void run(HostTensor& o, HostTensor& h, int64_t first, HostTensor& final_state) {
    Matrix state = state_of(kInitialState);
    Matrix start = state;  // of the segment
    const int64_t per_row = case_.forward.chunk_size;
    for (int64_t begin = range_.begin; begin < range_.end; begin += emulation_.chunk) {
      const int64_t done = begin - range_.begin;
      if (emulation_.segment > 0 && done > 0 && done % emulation_.segment == 0) {
        // The first segment's end is that of an ordinary walk.
        if (done > emulation_.segment) state = end_of_segment(start, begin);
        start = state;
      }
      if (done % per_row == 0) store_checkpoint(state, h, first + done / per_row);
      const int64_t rows = std::min(emulation_.chunk, range_.end - begin);
      const Matrix out = chunk(state, begin, rows);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t v = 0; v < s_.V; ++v) o.set(row(begin + i) * s_.V + v, out(i, v));
      }
    }
    each_of_state(state, [&](double& x, int64_t index) { final_state.set(index, x); });
  }

 private:
  void store_checkpoint(const Matrix& state, HostTensor& h, int64_t row) const {
    const int64_t size = s_.K * s_.V;
    for (int64_t i = 0; i < size; ++i) {
      h.set((row * s_.HV + hv_) * size + i,
            rounded(state.data[static_cast<std::size_t>(i)], emulation_.type));
    }
  }

  /// Phi start + B of the segment that ends before `end`.
  Matrix end_of_segment(const Matrix& start, int64_t end) const {
    Matrix B(s_.K, s_.V);
    Matrix Phi(s_.K, s_.K);
    for (int64_t k = 0; k < s_.K; ++k) Phi(k, k) = 1;
    for (int64_t begin = end - emulation_.segment; begin < end; begin += emulation_.chunk) {
      ChunkOperands x = operands(begin, emulation_.chunk);
      move_on(B, x, new_values(x, rounded(B, emulation_.type)));
      x.v = Matrix(x.rows, s_.K);
      move_on(Phi, x, new_values(x, rounded(Phi, emulation_.type)));
    }
    Matrix state = product(Phi, start);
    for (std::size_t i = 0; i < B.data.size(); ++i) state.data[i] += B.data[i];
    return state;
  }

  /// o of a chunk; moves the state on: (4.14) to (4.17).
  Matrix chunk(Matrix& state, int64_t begin, int64_t rows) const {
    const DType type = emulation_.type;
    const ChunkOperands x = operands(begin, rows);
    const Matrix h = rounded(state, type);
    const Matrix v_new = new_values(x, h);
    const double scale = case_.forward.effective_scale();
    // fla's Aqk carries the scale before it is rounded; the r form's kernels multiply o by it,
    // which keeps small scores further from the subnormals of fp16.
    const Matrix Aqk = emulation_.form == Emulation::Form::kWu ? rounded(times(x.P, scale), type)
                                                               : times(rounded(x.P, type), scale);
    Matrix o = times(product(rounded(x.qe, type), h), scale);
    const Matrix within = product(Aqk, v_new);
    for (std::size_t i = 0; i < o.data.size(); ++i) o.data[i] += within.data[i];
    move_on(state, x, v_new);
    return o;
  }
};

}  // namespace

TensorMap emulate(const Case& c, const Emulation& emulation) {
  const Sizes& s = c.forward.sizes;
  const std::vector<TokenRange> sequences = sequences_of(c);
  HostTensor o(DType::kF64, {s.B, s.T, s.HV, s.V});
  const auto N = static_cast<int64_t>(sequences.size());
  const bool v_first = c.forward.state_v_first;
  HostTensor state(DType::kF64, {N, s.HV, v_first ? s.V : s.K, v_first ? s.K : s.V});
  HostTensor h(DType::kF64, {c.forward.chunk_rows(), s.HV, s.K, s.V});
  const int64_t per_row = c.forward.chunk_size;
  int64_t first = 0;
  for (int64_t n = 0; n < N; ++n) {
    const TokenRange& range = sequences[static_cast<std::size_t>(n)];
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      ForwardHead(c, emulation, range, n, hv).run(o, h, first, state);
    }
    first += (range.end - range.begin + per_row - 1) / per_row;
  }
  return {{kO, std::move(o)}, {kH, std::move(h)}, {kFinalState, std::move(state)}};
}

}  // namespace kda::cases
