// Facts about the CPU, for kda::devices and `kda doctor`.
#pragma once

#include "kda/backend.h"

namespace kda {

DeviceInfo cpu_device_info();

}  // namespace kda
