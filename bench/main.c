#include <stdio.h>

#include "rafter/rafter.h"

int main(void) {
    printf("rafter %s\n", rafter_version());
    return 0;
}
