// native-kda: Kimi Delta Attention, forward, backward and decode. Includes the whole C++ interface.
#pragma once

#include "kda/backend.h"  // IWYU pragma: export
#include "kda/plan.h"     // IWYU pragma: export
#include "kda/problem.h"  // IWYU pragma: export
#include "kda/status.h"   // IWYU pragma: export
#include "kda/types.h"    // IWYU pragma: export
#include "kda/version.h"  // IWYU pragma: export
