/* SPDX-License-Identifier: Apache-2.0 */
/* The caller's floating-point environment. */
#include <fenv.h>

#include "core/fp.h"
#include "host.h"

/* Flags of this processor's control register that flush subnormal numbers. */
#if defined(__x86_64__)
enum { FLUSH = 0x8040 }; /* FTZ and DAZ */
#else
enum { FLUSH = 1 << 24 };
#endif

/* With every mode of the caller, all numbers of threads give the bits that one thread gives. */
void rounding_and_flushing_of_the_caller(void) {
    static const int rounding[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
    int changed = 0;
    fill_inputs(SUBNORMAL);
    rafter_context *const one = new_context(1, NULL), *const many = new_context(4, NULL);
    for (int call = 0; call < calls_count(); call++) {
        const uint64_t usual = result_of(one, call);
        for (int mode = 1; mode < 6; mode++) {
            const struct rafter_fp before = rafter_fp_get();
            struct rafter_fp fp = before;
            fesetround(rounding[mode % 3]);
            if (mode >= 3) {
                fp = rafter_fp_get();
                fp.control |= FLUSH;
                rafter_fp_set(fp);
            }
            fp = rafter_fp_get();
            const uint64_t wanted = result_of(one, call);
            for (int i = 0; i < 3; i++)
                expect(result_of(many, call) == wanted, "%s: bits depend on the thread in mode %d", call_name(call),
                       mode);
            const struct rafter_fp after = rafter_fp_get();
            expect(after.control >> 6 == fp.control >> 6, "%s has changed the caller's mode", call_name(call));
            rafter_fp_set(before);
            changed += wanted != usual;
        }
    }
    expect(changed > calls_count(), "only %d results depend on the mode: the test tests little", changed);
    rafter_context_destroy(one);
    rafter_context_destroy(many);
}

/* -inf among the inputs makes every exception; the caller traps all of them. */
void no_trap_and_no_flag(void) {
    fill_inputs(MINUS_INFINITY);
    rafter_context *const context = new_context(4, NULL);
    struct outputs outputs = new_outputs();
    for (int call = 0; call < calls_count(); call++) {
        feclearexcept(FE_ALL_EXCEPT);
        feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW);
        const int enabled = fegetexcept(); /* an aarch64 CPU may have no traps */
        const rafter_status status = make_call(context, call, &outputs);
        const int trapped = fegetexcept(), flags = fetestexcept(FE_ALL_EXCEPT);
        fedisableexcept(FE_ALL_EXCEPT);
        expect(status == RAFTER_OK, "%s: %s", call_name(call), rafter_last_error(context));
        expect(trapped == enabled, "%s has changed the traps", call_name(call));
        expect(flags == 0, "%s has set flags %x", call_name(call), (unsigned)flags);
    }
    rafter_context_destroy(context);
    free_outputs(&outputs);
}
