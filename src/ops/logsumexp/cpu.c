#include "core/variants.h"

extern const int RAFTER_KERNELS(logsumexp);
const int RAFTER_KERNELS(logsumexp) = 0;
