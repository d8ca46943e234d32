// Random cases for RapidCheck: sizes, dtypes, options and families of inputs that shrink.
#pragma once

#include <iosfwd>

#include <rapidcheck.h>

#include "support/names.h"

namespace kda::cases {

/// RapidCheck prints a failing case by this.
void showValue(const CaseSpec& spec, std::ostream& out);

}  // namespace kda::cases

namespace kda::test {

/// What a property needs of its cases.
struct Wanted {
  bool packed = true;  ///< may be packed
  bool only_packed = false;
  bool gates = true;          ///< may form the gate inside
  bool extreme = true;        ///< families with -inf gates, equal keys or silent outputs
  bool reduced_types = true;  ///< bf16 and fp16 tensors
  int64_t most_tokens = 200;
};

/// A case of bounded cost: K to 256, V to 130, T to most_tokens.
rc::Gen<CaseSpec> any_case(const Wanted& wanted = {});

}  // namespace kda::test
