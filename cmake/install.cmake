# SPDX-License-Identifier: Apache-2.0
# cmake --install: headers, both libraries, a CMake package (find_package(rafter)) and a pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS rafter rafter_static EXPORT rafter-targets)
install(DIRECTORY include/rafter DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT rafter-targets NAMESPACE rafter:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/rafter)

configure_package_config_file(cmake/rafter-config.cmake.in rafter-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/rafter)
write_basic_package_version_file(rafter-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/rafter-config.cmake ${PROJECT_BINARY_DIR}/rafter-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/rafter)

# pcfiledir is <prefix>/<libdir>/pkgconfig, with libdir one or two folders deep.
file(RELATIVE_PATH RAFTER_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/rafter.pc.in rafter.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/rafter.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
