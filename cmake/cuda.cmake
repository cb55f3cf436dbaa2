# SPDX-License-Identifier: Apache-2.0
# librafter_cuda: one .cu file per CUDA row of variants.inc, and what they share. The CUDA runtime is linked in, so that it
# does not have to be installed where the library runs.
set(CMAKE_CUDA_ARCHITECTURES ${cuda_architectures})
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)

file(GLOB cuda_kernels CONFIGURE_DEPENDS src/ops/*/cuda/kernels/*.cu) # kernels that several variants share
add_library(rafter_cuda SHARED src/cuda/backend.cu src/cuda/products.cu src/ops/row_group.cu ${cuda_variants} ${cuda_kernels} src/core/collectives.c src/core/fail.c
  src/core/scratch.c src/core/tensor.c)
foreach(op ${ops})
  add_library(rafter_cuda_${op}_rows OBJECT src/cuda/variant_rows.c)
  target_compile_definitions(rafter_cuda_${op}_rows PRIVATE RAFTER_OP_NAME=${op})
  target_include_directories(rafter_cuda_${op}_rows PRIVATE include src/ops/${op})
  target_link_libraries(rafter_cuda_${op}_rows PRIVATE rafter_flags)
  target_sources(rafter_cuda PRIVATE $<TARGET_OBJECTS:rafter_cuda_${op}_rows>)
endforeach()
set_source_files_properties(src/cuda/backend.cu PROPERTIES COMPILE_DEFINITIONS "${shared_definition}")
target_include_directories(rafter_cuda PRIVATE include src)
target_link_libraries(rafter_cuda PRIVATE ${CMAKE_DL_LIBS})
target_compile_definitions(rafter_cuda PRIVATE _GNU_SOURCE)
target_compile_options(rafter_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--threads=0 ${cuda_host_warnings}>)
if(RAFTER_CUDA_LINES)
  target_compile_options(rafter_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
endif()
include(CheckCompilerFlag)
if(RAFTER_CUDA_FAST_COMPILE)
  check_compiler_flag(CUDA --Ofast-compile=max RAFTER_HAS_OFAST_COMPILE) # CUDA 13 and later
  if(RAFTER_HAS_OFAST_COMPILE)
    target_compile_options(rafter_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
  endif()
endif()
if(RAFTER_CUDA_SMALL)
  check_compiler_flag(CUDA --compress-mode=size RAFTER_HAS_COMPRESS_MODE) # CUDA 12.8 and later
  if(RAFTER_HAS_COMPRESS_MODE)
    target_compile_options(rafter_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
endif()
target_link_options(rafter_cuda PRIVATE ${harden_link})
set_target_properties(rafter_cuda PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR} ${installed_rpath})
install(TARGETS rafter_cuda)
