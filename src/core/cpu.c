/* SPDX-License-Identifier: Apache-2.0 */
#include "core/cpu.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "rafter/rafter.h"

static enum rafter_isa found_isa = RAFTER_ISA_portable;
static char found_features[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct feature {
    const char *name;
    bool here;
};

#if defined(__x86_64__) || defined(__aarch64__)
static void list_features(const struct feature *features, int count) {
    for (int i = 0; i < count; i++) {
        if (!features[i].here)
            continue;
        const size_t used = strlen(found_features);
        snprintf(found_features + used, sizeof found_features - used, "%s%s", used ? " " : "", features[i].name);
    }
}
#endif

#if defined(__x86_64__)

/* Linux grants the 8 KiB of tile state only to processes that ask for it (arch_prctl(2)). */
static bool amx_granted(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static unsigned long long enabled_state(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((unsigned long long)high << 32) | low;
}

static void detect(void) {
    unsigned a = 0, b1 = 0, c1 = 0, d = 0, a7 = 0, b7 = 0, c7 = 0, d7 = 0, a71 = 0, bx = 0, cx = 0, dx = 0;
    __get_cpuid(1, &a, &b1, &c1, &d);
    if (__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7) && a7 >= 1)
        __get_cpuid_count(7, 1, &a71, &bx, &cx, &dx);

    const bool osxsave = c1 >> 27 & 1;
    const unsigned long long state = osxsave ? enabled_state() : 0;
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state >> 17 & 3) == 3;

    const struct feature features[] = {
        {"avx2", ymm && b7 >> 5 & 1},        {"fma", ymm && c1 >> 12 & 1},        {"f16c", ymm && c1 >> 29 & 1},
        {"avx512f", zmm && b7 >> 16 & 1},    {"avx512dq", zmm && b7 >> 17 & 1},   {"avx512bw", zmm && b7 >> 30 & 1},
        {"avx512vl", zmm && b7 >> 31 & 1},   {"avx512bf16", zmm && a71 >> 5 & 1}, {"avx512fp16", zmm && d7 >> 23 & 1},
        {"amx_tile", tiles && d7 >> 24 & 1}, {"amx_bf16", tiles && d7 >> 22 & 1},
    };
    enum { AVX2, FMA, F16C, F512, DQ512, BW512, VL512, BF512, FP512, TILE, TILE_BF16, FEATURES };
    list_features(features, FEATURES);

    if (features[AVX2].here && features[FMA].here && features[F16C].here)
        found_isa = RAFTER_ISA_avx2;
    if (found_isa == RAFTER_ISA_avx2 && features[F512].here && features[DQ512].here && features[BW512].here &&
        features[VL512].here)
        found_isa = RAFTER_ISA_avx512;
    if (found_isa == RAFTER_ISA_avx512 && features[BF512].here)
        found_isa = RAFTER_ISA_avx512bf16;
    if (found_isa == RAFTER_ISA_avx512bf16 && features[TILE].here && features[TILE_BF16].here && amx_granted())
        found_isa = RAFTER_ISA_amx;
}

#elif defined(__aarch64__)

static void detect(void) {
    /* Bits of the Linux ABI; a libc may be older than some of them. */
    enum { ASIMD = 1, FPHP = 9, ASIMDDP = 20, SVE = 22 }; /* of AT_HWCAP */
    enum { SVE2 = 1, I8MM = 13, BF16 = 14 };              /* of AT_HWCAP2 */
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    const struct feature features[] = {
        {"neon", first >> ASIMD & 1}, {"fp16", first >> FPHP & 1},  {"dotprod", first >> ASIMDDP & 1},
        {"bf16", second >> BF16 & 1}, {"i8mm", second >> I8MM & 1}, {"sve", first >> SVE & 1},
        {"sve2", second >> SVE2 & 1},
    };
    list_features(features, sizeof features / sizeof *features);

    if (first >> ASIMD & 1)
        found_isa = RAFTER_ISA_neon;
    if (found_isa == RAFTER_ISA_neon && second >> BF16 & 1)
        found_isa = RAFTER_ISA_neonbf16;
}

#else

static void detect(void) { /* portable code only */
}

#endif

enum rafter_isa rafter_cpu_isa(void) {
    pthread_once(&once, detect);
    return found_isa;
}

const char *rafter_cpu_features(void) {
    pthread_once(&once, detect);
    return found_features;
}

static const char *const names[] = {
#define RAFTER_ISA_STRING(name) #name,
    RAFTER_ISA_LEVELS(RAFTER_ISA_STRING)
#undef RAFTER_ISA_STRING
};

const char *rafter_isa_name(enum rafter_isa isa) {
    return names[isa];
}

enum rafter_isa rafter_isa_named(const char *name) {
    int isa = 0;
    while (isa < RAFTER_ISA_COUNT && strcmp(names[isa], name) != 0)
        isa++;
    return (enum rafter_isa)isa;
}
