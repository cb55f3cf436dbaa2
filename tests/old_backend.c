/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA backend of a build with other structs: librafter must refuse it. */
#include "core/backend.h"

rafter_cuda_entry rafter_cuda_backend;

__attribute__((visibility("default"))) const struct rafter_cuda *rafter_cuda_backend(void) {
    static const struct rafter_cuda table = {.interface = RAFTER_CUDA_INTERFACE, .shared_headers = "0123456789abcdef"};
    return &table;
}
