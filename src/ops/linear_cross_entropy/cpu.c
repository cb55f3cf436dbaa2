#include "core/variants.h"

extern const int RAFTER_KERNELS(linear_cross_entropy);
const int RAFTER_KERNELS(linear_cross_entropy) = 0;
