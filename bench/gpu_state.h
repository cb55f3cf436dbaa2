/* SPDX-License-Identifier: Apache-2.0 */
/* Clocks, temperature and power of the first GPU, from NVML. */
#ifndef RAFTER_BENCH_GPU_STATE_H
#define RAFTER_BENCH_GPU_STATE_H

#include "report.h"

/* All zero if NVML is not installed. */
struct gpu_state gpu_state(void);

#endif
