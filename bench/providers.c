#include "provider.h"

const struct provider *const providers[] = {
    &provider_rafter, &provider_naive,
#ifdef RAFTER_HAVE_ONEDNN
    &provider_onednn,
#endif
    &provider_cuda,   NULL,
};
