#include "core/variants.h"

extern const int RAFTER_KERNELS(cross_entropy);
const int RAFTER_KERNELS(cross_entropy) = 0;
