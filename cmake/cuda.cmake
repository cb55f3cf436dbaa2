# SPDX-License-Identifier: Apache-2.0
# librafter_cuda: every op's cuda.cu and what they share. The CUDA runtime is linked in, so that no version of it has to be
# installed where the library runs.
set(CMAKE_CUDA_ARCHITECTURES ${RAFTER_CUDA_ARCHITECTURES})
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)

add_library(rafter_cuda SHARED src/cuda/backend.cu src/cuda/products.cu src/core/fail.c src/core/scratch.c src/core/tensor.c)
foreach(op ${ops})
  target_sources(rafter_cuda PRIVATE src/ops/${op}/cuda.cu)
endforeach()
target_include_directories(rafter_cuda PRIVATE include src)
target_link_libraries(rafter_cuda PRIVATE ${CMAKE_DL_LIBS})
target_compile_definitions(rafter_cuda PRIVATE _GNU_SOURCE)
target_compile_options(rafter_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo --threads=0 -Xcompiler=-Wall,-Wextra,-Werror>)
set_target_properties(rafter_cuda PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
install(TARGETS rafter_cuda)
