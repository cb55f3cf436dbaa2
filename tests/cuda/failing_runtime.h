/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A build of librafter_cuda whose calls of the CUDA runtime, of cuBLASLt and of malloc fail on
 * request. The linker redirects them to failing_runtime.cu (tests/CMakeLists.txt); the library's
 * objects are those of the real one.
 */
#ifndef RAFTER_TESTS_CUDA_FAILING_RUNTIME_H
#define RAFTER_TESTS_CUDA_FAILING_RUNTIME_H

#ifdef __cplusplus
extern "C" {
#endif

struct failing_runtime {
    /* Without a GPU: no call reaches the CUDA runtime or cuBLASLt. All of them succeed, as on an
     * H200, and no kernel runs. Set it before the first context. */
    int pretend;
    int watched;        /* calls are counted, and may fail, while this is set */
    int fails_at;       /* the counted call, from 1, that fails; 0: none does */
    int calls;          /* counted so far */
    const char *failed; /* the function that failed, or NULL */
    int late;           /* launches after one that failed */
    int live;           /* memory, streams, events and handles that exist */
};

/* Exported by that library. */
#define FAILING_RUNTIME_ENTRY "rafter_failing_runtime"
typedef struct failing_runtime *failing_runtime_entry(void);

#ifdef __cplusplus
}
#endif

#endif
