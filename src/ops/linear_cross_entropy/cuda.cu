#include "cuda/backend.cuh"

/* linear_cross_entropy runs on the CPU only so far. */
extern "C" rafter_status rafter_cuda_linear_cross_entropy(rafter_context *context,
                                                          const struct linear_cross_entropy_call *call) {
    (void)call;
    return rafter_fail(context, RAFTER_UNSUPPORTED, "linear_cross_entropy does not run on CUDA in this version");
}
