/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of variants.inc, as the walk, `rafter check`, `rafter bench` and `rafter info` go
 * through them. */
#ifndef RAFTER_HARNESS_VARIANTS_H
#define RAFTER_HARNESS_VARIANTS_H

#include <stdbool.h>

#include "rafter/rafter.h"

enum { VARIANTS_MOST = 32, VARIANTS_MOST_OF_ALL = 6 * VARIANTS_MOST }; /* per op and kind of device; of all ops */

/* A row of an op's variants.inc. */
struct variant_row {
    const char *name;
    const char *level; /* the first device that it runs on: "avx2", "sm80"; "sm90a": that device only */
};

/* Row number `index` for CPUs or GPUs, in order of preference, whether or not this machine can run
 * it. False past the end. */
bool variant_row(const char *op, DLDeviceType device, int index, struct variant_row *row);

/* Whether any op has a variant of this name, for any device. */
bool variant_exists(const char *name);

/* The variant that the last call on this context took, or NULL: it took none. */
const char *variant_taken(const rafter_context *context);

/* Whether the last call failed with `status` because the context's variant does not serve it. */
bool variant_declined(const rafter_context *context, rafter_status status);

/* A context that uses this variant and no other, whatever RAFTER_VARIANT says; NULL:
 * rafter_last_error(NULL) says why. A NULL name leaves the choice to the library. `options` has
 * everything but size and variant. */
rafter_context *variant_context(const char *name, rafter_context_options options);

#endif
