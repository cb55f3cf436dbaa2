/* SPDX-License-Identifier: Apache-2.0 */
/* The list of all providers. A table has columns for those that serve its op, in this order.
 * peers.inc lists the columns of the Python worker. */
#include "provider.h"

const struct provider *const providers[] = {
    &provider_rafter, &provider_naive,
#ifdef RAFTER_HAVE_ONEDNN
    &provider_onednn,
#endif
    &provider_cuda,
#define RAFTER_PEER(column, has, early) &provider_##column,
#include "peers.inc"
#undef RAFTER_PEER
    &provider_cudnn,  NULL, /* after the Python columns: the worker knows where PyTorch's cuDNN is */
};
