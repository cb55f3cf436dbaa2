/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of ranks: checks of a caller's rafter_communicator, its functions with their errors turned
 * into sentences, and the exchange in which the ranks of a group compare their calls.
 *
 * On the CPU every call with a group begins with that exchange, even if a check has failed before:
 * the other ranks wait for it. So an op registers its groups before it checks anything else
 * (rafter_group_take), exchanges once only a collective can still fail (rafter_group_agree), and
 * ends with rafter_group_settle, which tells ranks that still wait why this one failed.
 */
#ifndef RAFTER_CORE_GROUP_H
#define RAFTER_CORE_GROUP_H

#include "core/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks a communicator and copies it; NULL gives an empty group. `sums`: the call needs
 * all_reduce_sum. On the CPU the context remembers that this rank owes the group an exchange until
 * rafter_group_agree makes it. `name`: for messages. */
rafter_status rafter_group_take(rafter_context *context, const char *name, const rafter_communicator *given, bool sums,
                                rafter_communicator *group);

static inline bool rafter_group_has(const rafter_communicator *group) {
    return group->ranks > 0;
}

/* What one rank sends to the others of its group: its status, and numbers that describe its call. Some of the numbers
 * must be equal on all ranks; the others only inform them. */
enum { RAFTER_MOST_TERMS = 24, RAFTER_TENDER_MESSAGE = 112 };
struct rafter_tender {
    uint32_t magic;
    int32_t rank, ranks;
    int32_t status;                      /* this rank's so far */
    double term[RAFTER_MOST_TERMS];      /* meaning and order are the op's */
    char message[RAFTER_TENDER_MESSAGE]; /* why it failed, cut to fit */
};

/* Exchanges tenders: `all` receives one from every rank. Terms whose entry in `names` is not NULL
 * must be equal. Fails on every rank alike if some rank has failed or such a term differs; a rank
 * that has failed itself keeps its own status and message. */
rafter_status rafter_group_agree(rafter_context *context, const char *name, const rafter_communicator *group,
                                 rafter_status status, const double term[RAFTER_MOST_TERMS],
                                 const char *const names[RAFTER_MOST_TERMS], struct rafter_tender *all);

/* The end of every call that may have groups. Returns `status`. If that is a failure, ranks that
 * have not heard of it yet are told. */
rafter_status rafter_group_settle(rafter_context *context, rafter_status status);

/* Call the functions of a communicator: gather on the context's stream, the sums on `stream`. A
 * failure becomes a status and a message. */
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
