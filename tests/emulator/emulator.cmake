# SPDX-License-Identifier: Apache-2.0
# rafter_emulate(SOURCES...): compiles these CUDA files as C++ for the emulator of this folder.
enable_language(CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)

# With RAFTER_SANITIZE kernels are watched too, as compute-sanitizer's memcheck does on a GPU.
set(emulator_options -O2 -Wall -Wextra)
if(RAFTER_SANITIZE)
  set(emulator_sanitizer -fsanitize=${RAFTER_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  list(APPEND emulator_options ${emulator_sanitizer})
  add_link_options(-fsanitize=${RAFTER_SANITIZE})
endif()

add_library(rafter_emulator SHARED ${CMAKE_CURRENT_LIST_DIR}/emulator.cpp ${CMAKE_CURRENT_LIST_DIR}/runtime.cpp)
target_include_directories(rafter_emulator PUBLIC ${CMAKE_CURRENT_LIST_DIR} ${CMAKE_CURRENT_LIST_DIR}/include)
target_link_libraries(rafter_emulator PRIVATE Threads::Threads)
target_compile_options(rafter_emulator PRIVATE ${emulator_options} -ftls-model=initial-exec)

# Loaded in place of cuBLAS.
add_library(rafter_emulated_cublaslt SHARED ${CMAKE_CURRENT_LIST_DIR}/cublaslt.cpp)
target_include_directories(rafter_emulated_cublaslt PRIVATE src)
target_link_libraries(rafter_emulated_cublaslt PRIVATE rafter_emulator)
target_compile_options(rafter_emulated_cublaslt PRIVATE ${emulator_options})
set_target_properties(rafter_emulated_cublaslt PROPERTIES OUTPUT_NAME cublasLt SOVERSION 13)

function(rafter_emulate)
  # -O1: the kernels take as long to compile as to run. FMA: as on a GPU. The warnings are those of another language.
  set(options -x c++ -O1 -w -fno-strict-aliasing -include cuda_runtime_api.h ${emulator_sanitizer})
  if(RAFTER_X86_64)
    list(APPEND options -mfma -mf16c)
  endif()
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${options}" COMPILE_DEFINITIONS "__CUDACC__;__CUDACC_VER_MAJOR__=13"
    INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/tests/emulator/include")
endfunction()
