# find_package(CUDAToolkit), also where Debian 12's CMake meets CUDA 13. Installed beside the package
# configuration, which needs it for the static library.
#
# CMake 3.25.1 sets a property of CUDA::nvToolsExt, which CUDA 13 no longer has, and stops; it does so
# only in projects that ask for 3.25 or later.

set(kda_minimum_version ${CMAKE_MINIMUM_REQUIRED_VERSION})
if(CMAKE_VERSION VERSION_LESS 3.26)
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
endif()
find_package(CUDAToolkit QUIET)
set(CMAKE_MINIMUM_REQUIRED_VERSION ${kda_minimum_version})
unset(kda_minimum_version)
