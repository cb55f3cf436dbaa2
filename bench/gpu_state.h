/* SPDX-License-Identifier: Apache-2.0 */
/* Clocks, temperature and power of the first GPU, as its management library tells them. */
#ifndef RAFTER_BENCH_GPU_STATE_H
#define RAFTER_BENCH_GPU_STATE_H

#include "report.h"

/* All zero where the library is not there. */
struct gpu_state gpu_state(void);

#endif
