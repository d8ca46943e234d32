// Which rows the calls of a test went to. Every test has them as properties `calls.ROW` and
// `refused.FAMILY: REASON` in gtest's JSON (--gtest_output), which tools/reliability.py reads.
#pragma once

#include <string_view>

#include "support/names.h"

namespace kda::test {

void count_call(std::string_view row);
/// A choice of rows does not take a call. Reasons that differ in sizes alone count as one.
void count_refusal(std::string_view choice, std::string_view reason);
/// What a family does not do, though it takes the call: a property `note.FAMILY: TEXT`.
void note_limit(std::string_view family, std::string_view text);

/// run_guarded, counted.
Result<GuardedOutcome> run_counted(const Problem& problem, const TensorMap& inputs,
                                   const Conditions& conditions = {});

}  // namespace kda::test
