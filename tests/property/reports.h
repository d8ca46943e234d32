// What the tests named after public fault reports share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "property/judging.h"

namespace kda::test {

/// Tests named after the reports' ids.
class Reports : public Judged {};

/// One gradient-bearing case with H = HV = 1, K = V = 64, fp32 unless changed.
CaseSpec small_spec(int64_t T);

/// Replaces an input, element by element; `index` counts in index order.
void set_input(Case& c, TensorId id, const std::function<double(int64_t index)>& value);

/// An input of another shape or dtype, or one that was absent; layouts of the problem follow.
void give_input(Case& c, TensorId id, HostTensor tensor);

/// 0, 1, ... of the first `count` numbers of a fixed stream: uniform in [low, high).
double uniform(int64_t index, double low, double high);

}  // namespace kda::test
