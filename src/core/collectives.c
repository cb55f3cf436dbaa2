/* SPDX-License-Identifier: Apache-2.0 */
/* In a file of its own because librafter_cuda carries a copy of it. */
#include "core/group.h"

static rafter_status checked(rafter_context *context, const char *name, const rafter_communicator *group,
                             const char *function, int error) {
    if (error == 0)
        return RAFTER_OK;
    const char *const words = group->describe ? group->describe(group->user, error) : NULL;
    return rafter_fail(context, RAFTER_COLLECTIVE_FAILED, "%s of %s returned %d on rank %d of %d%s%s", function, name,
                       error, (int)group->rank, (int)group->ranks, words ? ": " : "", words ? words : "");
}

rafter_status rafter_group_gather(rafter_context *context, const char *name, const rafter_communicator *group,
                                  const void *send, void *receive, size_t bytes) {
    if (bytes == 0)
        return RAFTER_OK;
    return checked(context, name, group, "all_gather",
                   group->all_gather(group->user, send, receive, bytes, context->stream));
}

rafter_status rafter_group_sum(rafter_context *context, const char *name, const rafter_communicator *group, float *data,
                               size_t count, void *stream) {
    if (count == 0)
        return RAFTER_OK;
    return checked(context, name, group, "all_reduce_sum", group->all_reduce_sum(group->user, data, count, stream));
}

rafter_status rafter_group_scatter(rafter_context *context, const char *name, const rafter_communicator *group,
                                   const float *send, float *receive, size_t count, void *stream) {
    if (count == 0)
        return RAFTER_OK;
    return checked(context, name, group, "reduce_scatter_sum",
                   group->reduce_scatter_sum(group->user, send, receive, count, stream));
}
