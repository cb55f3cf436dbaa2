/* SPDX-License-Identifier: Apache-2.0 */
#include "core/group.h"

#include <stdlib.h>
#include <string.h>

enum { MAGIC = 0x72616674 }; /* marks a tender: "raft" */

/* ---- checks ---------------------------------------------------------------------------------- */

static void note_owed(rafter_context *context, const char *name, const rafter_communicator *group) {
    for (int i = 0; i < context->owed_count; i++)
        if (strcmp(context->owed[i].name, name) == 0)
            return;
    if (context->owed_count < RAFTER_MOST_OWED)
        context->owed[context->owed_count++] = (struct rafter_owed){name, *group};
}

rafter_status rafter_group_take(rafter_context *context, const char *name, const rafter_communicator *given, bool sums,
                                rafter_communicator *group) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    *group = (rafter_communicator){.size = sizeof *group};
    if (!given)
        return RAFTER_OK;
    rafter_communicator g;
    RAFTER_TRY(rafter_take_args(context, "rafter_communicator", given, &g, sizeof g));
    if (g.ranks < 1)
        return rafter_fail(context, bad, "%s.ranks is %d, wanted at least 1", name, (int)g.ranks);
    if (g.rank < 0 || g.rank >= g.ranks)
        return rafter_fail(context, bad, "%s.rank is %d, wanted 0 to %d", name, (int)g.rank, (int)g.ranks - 1);
    if (g.multiprocessors < 0)
        return rafter_fail(context, bad, "%s.multiprocessors is %d, wanted at least 0", name, (int)g.multiprocessors);
    if (!g.all_gather)
        return rafter_fail(context, bad, "%s.all_gather is NULL, wanted a function", name);
    if (sums && !g.all_reduce_sum)
        return rafter_fail(context, bad, "%s.all_reduce_sum is NULL, wanted a function", name);
    *group = g;
    if (!context->cuda)
        note_owed(context, name, &g);
    return RAFTER_OK;
}

/* ---- agreement ------------------------------------------------------------------------------- */

static void forget(rafter_context *context, const char *name) {
    int left = 0;
    for (int i = 0; i < context->owed_count; i++)
        if (strcmp(context->owed[i].name, name) != 0)
            context->owed[left++] = context->owed[i];
    context->owed_count = left;
}

static struct rafter_tender tender_of(const rafter_context *context, const rafter_communicator *group,
                                      rafter_status status) {
    struct rafter_tender mine = {.magic = MAGIC, .rank = group->rank, .ranks = group->ranks, .status = (int32_t)status};
    if (status != RAFTER_OK) {
        size_t length = strlen(context->error);
        length = length < sizeof mine.message - 1 ? length : sizeof mine.message - 1;
        memcpy(mine.message, context->error, length);
    }
    return mine;
}

/* Checks the tenders of all ranks and fails for the first problem. All ranks find the same one. */
static rafter_status compare(rafter_context *context, const char *name, int ranks,
                             const char *const names[RAFTER_MOST_TERMS], const struct rafter_tender *all) {
    for (int r = 0; r < ranks; r++)
        if (all[r].magic != MAGIC || all[r].rank != r || all[r].ranks != ranks)
            return rafter_fail(context, RAFTER_RANKS_DISAGREE,
                               "what rank %d of %s sent came from rank %d of %d, wanted rank %d of %d: its ranks are "
                               "numbered otherwise, or are in different calls",
                               r, name, (int)all[r].rank, (int)all[r].ranks, r, ranks);
    for (int r = 0; r < ranks; r++)
        if (all[r].status != RAFTER_OK)
            return rafter_fail(context, RAFTER_RANKS_DISAGREE, "rank %d of %s failed: %.*s", r, name,
                               RAFTER_TENDER_MESSAGE - 1, all[r].message);
    for (int t = 0; t < RAFTER_MOST_TERMS; t++)
        for (int r = 1; names[t] && r < ranks; r++)
            if (memcmp(&all[r].term[t], &all[0].term[t], sizeof all[0].term[t]) != 0)
                return rafter_fail(context, RAFTER_RANKS_DISAGREE,
                                   "ranks of %s disagree: %s is %.9g on rank 0 and %.9g on rank %d", name, names[t],
                                   all[0].term[t], all[r].term[t], r);
    return RAFTER_OK;
}

rafter_status rafter_group_agree(rafter_context *context, const char *name, const rafter_communicator *group,
                                 rafter_status status, const double term[RAFTER_MOST_TERMS],
                                 const char *const names[RAFTER_MOST_TERMS], struct rafter_tender *all) {
    struct rafter_tender mine = tender_of(context, group, status);
    if (term)
        memcpy(mine.term, term, sizeof mine.term);
    forget(context, name);
    const rafter_status gathered = rafter_group_gather(context, name, group, &mine, all, sizeof mine);
    if (status != RAFTER_OK || gathered != RAFTER_OK)
        return status != RAFTER_OK ? status : gathered;
    return compare(context, name, group->ranks, names, all);
}

rafter_status rafter_group_settle(rafter_context *context, rafter_status status) {
    if (!context || status == RAFTER_OK)
        return status;
    char error[sizeof context->error]; /* kept: a collective that fails below would overwrite it */
    memcpy(error, context->error, sizeof error);
    while (context->owed_count > 0) {
        const struct rafter_owed owed = context->owed[0];
        struct rafter_tender *const all = malloc((size_t)owed.group.ranks * sizeof *all);
        if (all)
            rafter_group_agree(context, owed.name, &owed.group, status, NULL, NULL, all);
        else
            forget(context, owed.name);
        free(all);
        memcpy(context->error, error, sizeof error);
    }
    return status;
}
