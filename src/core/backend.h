/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA backend is a second shared library, librafter_cuda. librafter loads it when a context
 * for a CUDA device is created. The two share one table of functions, struct rafter_cuda.
 *
 * An op's op.c checks the arguments of a call, whatever the device, into a struct <op>_call (the
 * op's call.h). core/variants.c then picks a row of the op's variants.inc: a CPU row runs here, a
 * CUDA row in the backend.
 */
#ifndef RAFTER_CORE_BACKEND_H
#define RAFTER_CORE_BACKEND_H

#include "core/variants.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Both libraries are built from one tree, and share structs. Two checks at load keep a file of
 * another build from being used: this number, for changes of struct rafter_cuda itself, and a hash
 * of all headers that declare shared structs (RAFTER_SHARED_HEADERS, from CMakeLists.txt). */
enum { RAFTER_CUDA_INTERFACE = 8 };

struct rafter_loss;
struct logsumexp_call;

struct rafter_cuda {
    int interface;
    const char *shared_headers; /* RAFTER_SHARED_HEADERS of its build */

    /* Creates the context's device state: the default scratch allocator, counters, the flag for bad
     * labels. */
    rafter_status (*open)(rafter_context *context);
    void (*close)(rafter_context *context);
    void (*set_stream)(rafter_context *context); /* to context->stream */

    /* The CUDA rows of each op: as many as its struct rafter_op says, in the same order. */
    const struct rafter_variant *rows[RAFTER_OP_COUNT];

    /* Enqueues a planned call on the context's stream. Never synchronises. `op` begins the error
     * message if a launch fails. */
    rafter_status (*run)(rafter_context *context, const char *op, const struct rafter_call *call,
                         const struct rafter_plan *plan);

    /* Waits for the stream. *found: a kernel has seen a label out of range since the last call of
     * this function. */
    rafter_status (*bad_labels)(rafter_context *context, bool *found);

    /* Around a call of a loss with a row_group. begin_rows: `loss` gets mean's denominator summed over all ranks,
     * which the context keeps in device memory. end_rows: the loss becomes the sum over all ranks. */
    rafter_status (*begin_rows)(rafter_context *context, struct rafter_loss *loss);
    rafter_status (*end_rows)(rafter_context *context, const struct rafter_loss *loss);

    /* Around the all-gather of a logsumexp over ranks. begin_lse appends a hash of the call to this rank's lse, one
     * number per line at `own`. end_lse writes the lse over all ranks from what all of them sent, or NaN if their
     * hashes differ. */
    rafter_status (*begin_lse)(rafter_context *context, const struct logsumexp_call *call, float *own);
    rafter_status (*end_lse)(rafter_context *context, const struct logsumexp_call *call, const float *all);
};

/* The one symbol that librafter_cuda exports. */
typedef const struct rafter_cuda *rafter_cuda_entry(void);
#define RAFTER_CUDA_ENTRY "rafter_cuda_backend"

#ifdef __cplusplus
}
#endif

#endif
