#include "core/variants.h"

extern const int RAFTER_KERNELS(lrpe_cosine);
const int RAFTER_KERNELS(lrpe_cosine) = 0;
