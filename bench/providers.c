/* SPDX-License-Identifier: Apache-2.0 */
/* The whole list of providers. Each table has the columns that serve its op, in this order; those of the Python worker
 * are listed in peers.inc. */
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
    &provider_cudnn,  NULL, /* after those: the worker knows where PyTorch keeps it */
};
