// The names of the case library and of the tensors that the tests use without their namespaces.
#pragma once

#include "compare.h"
#include "execute.h"
#include "generate.h"
#include "guard/run.h"

namespace kda::test {

using cases::Arrangement;
using cases::Case;
using cases::CaseSpec;
using cases::Conditions;
using cases::Difference;
using cases::Family;
using cases::GuardedOutcome;
using cases::HostTensor;
using cases::OutputTypes;
using cases::run_guarded;
using cases::TensorMap;
using enum TensorId;

}  // namespace kda::test
