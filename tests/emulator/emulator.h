/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs CUDA kernels on the CPU, so that they are tested where there is no GPU. It emulates what CUDA promises, not what
 * a GPU does: the threads of a block run one after the other up to their next barrier, so a missing barrier shows as a
 * wrong result; memory that was never written holds NaN; a kernel that may start before the previous one has ended
 * (programmatic dependent launch) does so.
 *
 * Kernels are compiled as C++ with the headers of include/, which replace CUDA's headers and those of src/cuda that
 * contain PTX. A thread is a fiber, a block is run by an operating system thread, and shared memory is thread_local.
 */
#ifndef RAFTER_TESTS_EMULATOR_H
#define RAFTER_TESTS_EMULATOR_H

#include <functional>
#include <stdint.h>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {
    }
};

#pragma GCC visibility push(default)

namespace emulator {

struct Index {
    unsigned x, y, z;
};

/* The position, in its warp and cluster, of the fiber that runs on this operating system thread. */
struct Place {
    unsigned lane, cluster_rank, cluster_blocks;
};
extern __thread Place place __attribute__((tls_model("initial-exec")));

/* Ends the program with a sentence that names the kernel's place. */
[[noreturn]] void fail(const char *what);

/* ---- what kernels call ----------------------------------------------------------------------- */

/* Lets other threads run. A thread that polls a word in memory calls it between two reads. */
void yield();
/* barrier: 0 to 15, or FIRST_GROUP_BARRIER plus the number of a warpgroup. threads: how many threads of the block
 * arrive, or 0 for all that have not ended. */
constexpr int FIRST_GROUP_BARRIER = 16, GROUP_THREADS = 128;
void sync_threads(int barrier, int threads);
/* Waits for the lanes of the mask, and returns the values that the 32 lanes passed: NO_VALUE for a lane that is not in
 * the mask, or has ended. */
constexpr uint64_t NO_VALUE = 0xfff7dead7ff7deadu;
const uint64_t *exchange(unsigned mask, uint64_t value);
void cluster_arrive();
void cluster_wait();
/* Maps an address in this block's shared memory to the same place in block `rank` of its cluster. */
void *in_cluster(const void *shared, unsigned rank);
/* Tells the scheduler that the thread no longer waits for what it polled with yield. */
void passed();
void wait_for_previous_kernel();

void start_next_kernel();

/* Asynchronous copies. They are done as late as CUDA allows: when the thread waits for their group. */
void copy_async(void *to, const void *from, int bytes);
void copy_commit();
void copy_wait(int groups);

/* ---- launches -------------------------------------------------------------------------------- */

struct Grid {
    dim3 blocks, threads;
    int64_t shared_bytes;
    unsigned cluster;
    bool overlaps;    /* programmatic dependent launch */
    bool cooperative; /* all blocks run at the same time */
    const void *stream;
    char *(*shared)();            /* where this operating system thread has the block's dynamic shared memory */
    std::function<void()> kernel; /* run once per thread */
};
/* Enqueues it. It runs when something is enqueued after it, or waited for. */
void launch(Grid grid);
/* Runs what is enqueued. */
void finish();

} // namespace emulator

#pragma GCC visibility pop

#endif
