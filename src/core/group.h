/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of ranks: checks of a caller's rafter_communicator, its functions with their errors turned
 * into sentences, and the exchange in which the ranks of a group compare their calls.
 *
 * On the CPU every call with a group begins with that exchange, also if it has failed by then: the
 * other ranks wait for it. So an op registers its groups before it checks anything else
 * (rafter_group_take), agrees when nothing but a collective can fail any more (rafter_group_agree),
 * and ends with rafter_group_settle, which tells ranks that still wait why this one failed.
 */
#ifndef RAFTER_CORE_GROUP_H
#define RAFTER_CORE_GROUP_H

#include "core/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks a communicator and copies it; NULL gives an empty group. `sums`: the call needs
 * all_reduce_sum. Until the ranks have agreed, the context knows that this rank owes them an
 * exchange. `name`: for messages. */
rafter_status rafter_group_take(rafter_context *context, const char *name, const rafter_communicator *given, bool sums,
                                rafter_communicator *group);

static inline bool rafter_group_has(const rafter_communicator *group) {
    return group->ranks > 0;
}

/* What the ranks of a group compare. Numbers that are to be equal, then numbers that every rank only
 * tells the others. */
enum { RAFTER_MOST_TERMS = 24, RAFTER_TENDER_MESSAGE = 112 };
struct rafter_tender {
    uint32_t magic;
    int32_t rank, ranks;
    int32_t status; /* this rank's so far */
    double term[RAFTER_MOST_TERMS];
    char message[RAFTER_TENDER_MESSAGE]; /* why it failed, cut to fit */
};

/* Exchanges tenders. `all` has one for every rank. Terms whose name is not NULL are to be equal.
 * Fails on every rank alike if one of them has failed or if they differ; a rank that has failed
 * itself keeps its own status and message. */
rafter_status rafter_group_agree(rafter_context *context, const char *name, const rafter_communicator *group,
                                 rafter_status status, const double term[RAFTER_MOST_TERMS],
                                 const char *const names[RAFTER_MOST_TERMS], struct rafter_tender *all);

/* The end of every call that may have groups. Returns `status`. If that is a failure, ranks that
 * have not heard of it yet are told. */
rafter_status rafter_group_settle(rafter_context *context, rafter_status status);

/* The functions of a communicator: on the context's stream, or on `stream`. */
rafter_status rafter_group_gather(rafter_context *context, const char *name, const rafter_communicator *group,
                                  const void *send, void *receive, size_t bytes);
rafter_status rafter_group_sum(rafter_context *context, const char *name, const rafter_communicator *group, float *data,
                               size_t count, void *stream);
rafter_status rafter_group_scatter(rafter_context *context, const char *name, const rafter_communicator *group,
                                   const float *send, float *receive, size_t count, void *stream);

#ifdef __cplusplus
}
#endif

#endif
