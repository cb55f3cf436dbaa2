/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that are threads of one process, for tests and for measurements without a network. Not a
 * transport: on a GPU every collective waits for the device and goes through the host.
 *
 *     struct loopback *wire = loopback_new(ranks);
 *     loopback_run(ranks, body, arg);      // in body: rafter_communicator g = loopback_rank(wire, rank, context);
 *     loopback_free(wire);
 *
 * Collectives whose ranks pass different sizes fail on all of them, as does one that a rank does not
 * join within LOOPBACK_SECONDS.
 */
#ifndef RAFTER_HARNESS_LOOPBACK_H
#define RAFTER_HARNESS_LOOPBACK_H

#include "rafter/rafter.h"

enum { LOOPBACK_MOST_RANKS = 64, LOOPBACK_SECONDS = 60 };

/* What a failed collective returns. */
enum { LOOPBACK_MISMATCH = 41, LOOPBACK_ALONE, LOOPBACK_BROKEN };

struct loopback;

struct loopback *loopback_new(int ranks);
void loopback_free(struct loopback *wire);

/* The communicator of one rank. `context`: the rank's; on a GPU its stream is waited for. The
 * communicator also has reduce_scatter_sum. */
rafter_communicator loopback_rank(struct loopback *wire, int rank, const rafter_context *context);

/* Called for a rank whose call has failed: it takes part in no further collective, and the others, which
 * may be waiting for it, fail too. */
void loopback_leave(const rafter_communicator *rank);

/* From now on collectives fail on every rank after `calls` more of them. */
void loopback_break(struct loopback *wire, int calls);

/* What rank 0 has sent so far: bytes given to all_gather, and to the two sums. */
struct loopback_traffic {
    size_t gathers, gathered_bytes, sums, summed_bytes;
};
struct loopback_traffic loopback_traffic(const struct loopback *wire);

/* Runs body(arg, rank) for every rank, each on a thread of its own, and waits for all. */
void loopback_run(int ranks, void (*body)(void *arg, int rank), void *arg);

#endif
