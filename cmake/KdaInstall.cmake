# Install rules, the package that find_package(kda) finds, and a file for pkg-config.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kda_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kda)
install(TARGETS kda EXPORT kda-targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime
                NAMELINK_COMPONENT development
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
install(DIRECTORY include/kda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(EXPORT kda-targets NAMESPACE kda:: DESTINATION ${kda_package_dir} COMPONENT development)
configure_package_config_file(cmake/kda-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/kda-config.cmake
                              INSTALL_DESTINATION ${kda_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/kda-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kda-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/kda-config-version.cmake
              cmake/KdaFindCudaToolkit.cmake
        DESTINATION ${kda_package_dir} COMPONENT development)

# The linker needs the dependencies of a static library whenever it is used, those of a shared one
# only for `pkg-config --static`.
list(TRANSFORM OpenMP_CXX_LIB_NAMES PREPEND "-l" OUTPUT_VARIABLE kda_pc_system_libs)
list(JOIN kda_pc_system_libs " " kda_pc_system_libs)
string(APPEND kda_pc_system_libs " -lstdc++ -lm")
if(KDA_HAS_CUDA)
  string(PREPEND kda_pc_system_libs
         "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl -lpthread ")
endif()
set(kda_pc_requires Requires)
set(kda_pc_libs "-L\${libdir} -lkda")
set(kda_pc_private_libs "")
if(BUILD_SHARED_LIBS)
  string(APPEND kda_pc_requires .private)
  set(kda_pc_private_libs ${kda_pc_system_libs})
else()
  string(APPEND kda_pc_libs " ${kda_pc_system_libs}")
endif()
# Relative to the file, so that an installation can be moved; not with folders given as absolute.
set(kda_pc_prefix ${CMAKE_INSTALL_PREFIX})
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH kda_pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
  string(REGEX REPLACE "/$" "" kda_pc_prefix "\${pcfiledir}/${kda_pc_prefix}")
endif()
foreach(folder LIBDIR INCLUDEDIR)
  string(TOLOWER kda_pc_${folder} variable)
  set(${variable} ${CMAKE_INSTALL_${folder}})
  if(NOT IS_ABSOLUTE "${${variable}}")
    string(PREPEND ${variable} "\${prefix}/")
  endif()
endforeach()
configure_file(cmake/kda.pc.in ${CMAKE_CURRENT_BINARY_DIR}/kda.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kda.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT development)

if(KDA_TOOLS AND TARGET kda_program)
  install(TARGETS kda_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
endif()
