#include "suite.h"

#include <utility>

namespace kda::cases {
namespace {

CaseSpec sized(const Sizes& sizes) {
  CaseSpec spec;
  spec.sizes = sizes;
  return spec;
}

CaseSpec packed(int64_t T, std::vector<int64_t> cu_seqlens) {
  CaseSpec spec = sized({1, T, 2, 2, 32, 48, 0, 0});
  spec.cu_seqlens = std::move(cu_seqlens);
  return spec;
}

void add_families(std::vector<CaseSpec>& suite, bool half) {
  for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
    for (const Family family : kFamilies) {
      CaseSpec spec = sized({1, 130, 1, 2, 64, half ? 64 : 32, 0, 0});
      spec.family = family;
      spec.gate = gate;
      spec.qk_l2norm = gate != Gate::kNone || family == Family::kSmall;
      suite.push_back(spec);
    }
  }
}

void add_sizes(std::vector<CaseSpec>& suite) {
  for (const Sizes& sizes : {Sizes{1, 1, 1, 1, 64, 64, 0, 0}, Sizes{2, 63, 2, 2, 32, 64, 0, 0},
                             Sizes{2, 64, 1, 1, 128, 64, 0, 0}, Sizes{1, 65, 1, 4, 64, 128, 0, 0},
                             Sizes{1, 97, 3, 3, 60, 100, 0, 0}, Sizes{1, 70, 1, 1, 256, 16, 0, 0},
                             Sizes{3, 33, 2, 4, 1, 1, 0, 0}, Sizes{1, 520, 1, 1, 64, 64, 0, 0},
                             Sizes{1, 0, 1, 1, 16, 16, 0, 0}}) {
    suite.push_back(sized(sizes));
  }
  suite.push_back(packed(200, {0, 0, 1, 64, 64, 129, 190, 190}));
  suite.push_back(packed(130, {0, 130}));
  suite.push_back(packed(96, {0, 40, 70}));
  suite.back().cu_dtype = DType::kI32;
  suite.back().poison_tail = true;
}

void add_options(std::vector<CaseSpec>& suite) {
  const CaseSpec base = sized({1, 100, 2, 2, 64, 96, 0, 0});
  const auto add = [&](auto change) {
    CaseSpec spec = base;
    change(spec);
    suite.push_back(spec);
  };
  add([](CaseSpec& s) { s.chunk_size = 32; });
  add([](CaseSpec& s) { s.state_v_first = true; });
  add([](CaseSpec& s) { s.scale = 1.0; });
  add([](CaseSpec& s) { s.initial_state = false; });
  add([](CaseSpec& s) { s.dfinal_state = false; });
  add([](CaseSpec& s) { s.beta_sigmoid = true; });
  add([](CaseSpec& s) {
    s.beta_sigmoid = true;
    s.allow_neg_eigval = true;
    s.qk_l2norm = true;
  });
  add([](CaseSpec& s) {
    s.gate = Gate::kLowerBound;
    s.a_log = false;
  });
  add([](CaseSpec& s) {
    s.gate = Gate::kSoftplus;
    s.dt_bias = false;
  });
}

void add_dtypes(std::vector<CaseSpec>& suite) {
  for (const DType io : {DType::kBF16, DType::kF16}) {
    CaseSpec plain = sized({1, 100, 2, 2, 64, 96, 0, 0});
    plain.io = io;
    suite.push_back(plain);
    CaseSpec full = plain;
    full.gate_dtype = io;
    full.parameter_dtype = DType::kBF16;
    full.gate = Gate::kSoftplus;
    full.qk_l2norm = true;
    full.beta_sigmoid = true;
    suite.push_back(full);
  }
  // Sizes that every 16-bit implementation takes.
  for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
    CaseSpec spec = sized(gate == Gate::kSoftplus ? Sizes{1, 130, 1, 2, 64, 128, 0, 0}
                                                  : Sizes{1, 130, 2, 2, 128, 64, 0, 0});
    spec.io = DType::kF16;
    spec.gate = gate;
    spec.qk_l2norm = spec.beta_sigmoid = gate != Gate::kNone;
    suite.push_back(spec);
  }
}

}  // namespace

std::vector<CaseSpec> builtin_suite(DType io) {
  std::vector<CaseSpec> suite;
  add_families(suite, size_of(io) == 2);
  add_sizes(suite);
  add_options(suite);
  for (CaseSpec& spec : suite) spec.io = io;
  add_dtypes(suite);
  uint64_t seed = 1;
  for (CaseSpec& spec : suite) spec.seed = seed++;
  return suite;
}

}  // namespace kda::cases
