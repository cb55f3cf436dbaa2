# SPDX-License-Identifier: Apache-2.0
# libFuzzer targets: calls of the API (tests/fuzz.c) and the reader of reports. The library is built with RAFTER_SANITIZE, which
# should have fuzzer-no-link, so that the fuzzer sees what its inputs reach.
# Not reported: adding 0 to a null pointer, which every compiler defines and the next C standard allows.
target_compile_options(rafter_flags INTERFACE -fno-sanitize=pointer-overflow)
add_executable(fuzz_api tests/fuzz.c src/harness/gpu_stub.c)
target_link_libraries(fuzz_api PRIVATE rafter_static)
add_executable(fuzz_report tests/fuzz_report.c ${report_sources})
target_include_directories(fuzz_report PRIVATE bench include)
foreach(target fuzz_api fuzz_report)
  target_compile_definitions(${target} PRIVATE RAFTER_LIBFUZZER)
  target_link_libraries(${target} PRIVATE rafter_flags Threads::Threads m ${CMAKE_DL_LIBS})
  target_link_options(${target} PRIVATE -fsanitize=fuzzer)
endforeach()
