// Operations among hostile memory, under the names that the tests use.
#pragma once

#include "guard/run.h"

namespace kda::test {

using cases::Arrangement;
using cases::Conditions;
using cases::GuardedOutcome;
using cases::run_guarded;

}  // namespace kda::test
