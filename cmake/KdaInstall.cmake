# Install rules and the package that find_package(kda) finds.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS kda EXPORT kda-targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/kda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT kda-targets NAMESPACE kda:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kda)
configure_package_config_file(cmake/kda-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/kda-config.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kda)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/kda-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kda-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/kda-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kda)
if(KDA_TOOLS AND TARGET kda_program)
  install(TARGETS kda_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
