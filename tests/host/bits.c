/* SPDX-License-Identifier: Apache-2.0 */
/* What the bits of a result do not depend on, besides the number of threads (pool.c). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

/* Outputs of this size are written past the caches, for which kernels want aligned addresses, unless
 * the last-level cache has over 128 MiB. */
enum { LARGE = 64 << 20 };

static uint64_t hash_memory(const unsigned char *memory, size_t bytes) {
    return hash_of(&(struct outputs){.memory = (unsigned char *)memory, .bytes = bytes / 8 * 8});
}

/* Every call, at several addresses within a cache line. */
static void small_outputs(void) {
    rafter_context *const context = new_context(2, NULL);
    struct outputs outputs = new_outputs();
    for (int call = 0; call < calls_count(); call++) {
        const uint64_t wanted = result_of(context, call);
        for (outputs.shift = 8; outputs.shift < 64; outputs.shift += 24) {
            expect(make_call(context, call, &outputs) == RAFTER_OK, "%s", rafter_last_error(context));
            expect(hash_of(&outputs) == wanted, "%s: other bits at byte %zu of a line", call_name(call), outputs.shift);
        }
    }
    rafter_context_destroy(context);
    free_outputs(&outputs);
}

/* Softmax along the rows of a large tensor, at several addresses within a cache line. */
static void large_outputs(void) {
    static const int64_t columns[] = {1000, 1024};
    static const rafter_dtype dtypes[] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};
    unsigned char *const x = aligned_alloc(64, LARGE), *const y = aligned_alloc(64, LARGE + 64);
    expect(x && y, "no memory");
    uint32_t state = 1;
    for (size_t i = 0; i < LARGE / 2; i++) { /* numbers of size 1 in each 16-bit type, and about so as fp32 */
        state = state * 1664525 + 1013904223;
        const uint16_t bits = (uint16_t)(0x3c00 + (state >> 23));
        memcpy(x + 2 * i, &bits, sizeof bits);
    }
    rafter_context *const context = new_context(2, NULL);
    for (int t = 0; t < 3; t++)
        for (int c = 0; c < 2; c++) {
            const int64_t bytes = dtypes[t] == RAFTER_F32 ? 4 : 2;
            int64_t shape[] = {LARGE / (columns[c] * bytes), columns[c]};
            const DLTensor from = rafter_tensor(x, dtypes[t], 2, shape);
            uint64_t first = 0;
            for (int64_t shift = 0; shift < 64; shift += 5 * bytes) {
                const DLTensor to = rafter_tensor(y + shift, dtypes[t], 2, shape);
                const rafter_act_args args = {
                    .size = sizeof args, .kind = RAFTER_ACT_SOFTMAX, .dim = 1, .x = &from, .y = &to};
                expect(rafter_act_forward(context, &args) == RAFTER_OK, "%s", rafter_last_error(context));
                const uint64_t hash = hash_memory(y + shift, (size_t)(shape[0] * shape[1] * bytes));
                first = shift == 0 ? hash : first;
                expect(hash == first, "softmax of %lld columns, dtype %d: other bits at byte %lld of a line",
                       (long long)columns[c], (int)dtypes[t], (long long)shift);
            }
        }
    rafter_context_destroy(context);
    free(x);
    free(y);
}

void addresses_do_not_change_bits(void) {
    small_outputs();
    large_outputs();
}
