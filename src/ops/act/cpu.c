#include "core/variants.h"

extern const int RAFTER_KERNELS(act);
const int RAFTER_KERNELS(act) = 0;
