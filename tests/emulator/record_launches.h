/* SPDX-License-Identifier: Apache-2.0 */
/* Launches that are checked and recorded instead of run, so that tensors may have any size and no memory. */
#ifndef RAFTER_EMULATOR_RECORD_LAUNCHES_H
#define RAFTER_EMULATOR_RECORD_LAUNCHES_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* From now on `record` is called for each launch that a GPU would accept. No kernel or matrix product runs, and device
 * memory is neither set nor copied, and may have any size. NULL: kernels run again. */
void emulator_record_launches(void (*record)(const void *kernel));
bool emulator_records_launches(void);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
