#include "property/reports.h"

#include "random.h"

namespace kda::test {

KDA_FOR_EACH_FAMILY(Reports);

CaseSpec small_spec(int64_t T) {
  CaseSpec spec;
  spec.sizes = {.B = 1, .T = T, .H = 1, .HV = 1, .K = 64, .V = 64};
  return spec;
}

void set_input(Case& c, TensorId id, const std::function<double(int64_t index)>& value) {
  HostTensor& tensor = c.inputs.at(id);
  for (int64_t i = 0; i < tensor.count(); ++i) tensor.set(i, value(i));
}

void give_input(Case& c, TensorId id, HostTensor tensor) {
  c.inputs[id] = std::move(tensor);
  c.forward = forward_problem(c);
}

double uniform(int64_t index, double low, double high) {
  return cases::Random(7, 1).uniform(static_cast<uint64_t>(index), low, high);
}

}  // namespace kda::test
