/* SPDX-License-Identifier: Apache-2.0 */
/* Dtypes, rounding, and reproducible random numbers. */
#include <math.h>
#include <string.h>

#include "harness/internal.h"

static const struct {
    const char *name;
    uint8_t code, bits;
    int digits, least_exponent; /* of floats: bits of the significand, exponent of the smallest normal */
} dtypes[] = {
    [RAFTER_F32] = {"fp32", kDLFloat, 32, 24, -126}, [RAFTER_BF16] = {"bf16", kDLBfloat, 16, 8, -126},
    [RAFTER_F16] = {"fp16", kDLFloat, 16, 11, -14},  [RAFTER_I32] = {"int32", kDLInt, 32, 0, 0},
    [RAFTER_I64] = {"int64", kDLInt, 64, 0, 0},      [RAFTER_U8] = {"uint8", kDLUInt, 8, 0, 0},
};

const char *problem_dtype_name(rafter_dtype dtype) {
    return dtypes[dtype].name;
}

int64_t problem_dtype_bytes(rafter_dtype dtype) {
    return dtypes[dtype].bits / 8;
}

DLDataType problem_dl_dtype(rafter_dtype dtype) {
    return (DLDataType){dtypes[dtype].code, dtypes[dtype].bits, 1};
}

double problem_unit(rafter_dtype dtype, double x) {
    int exponent;
    frexp(x, &exponent);
    exponent -= 1;
    if (x == 0 || exponent < dtypes[dtype].least_exponent)
        exponent = dtypes[dtype].least_exponent;
    return ldexp(1.0, exponent - dtypes[dtype].digits + 1);
}

double problem_round(rafter_dtype dtype, double x) {
    if (dtypes[dtype].digits == 0 || !isfinite(x))
        return x;
    const double u = problem_unit(dtype, x), rounded = nearbyint(x / u) * u;
    const double largest = dtype == RAFTER_F16 ? 65504.0 : dtype == RAFTER_BF16 ? 0x1.fep127 : 0x1.fffffep127;
    return fabs(rounded) > largest ? copysign(INFINITY, x) : rounded;
}

static uint16_t half_bits(double x) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double size = fabs(problem_round(RAFTER_F16, x));
    if (isnan(x))
        return 0x7e00;
    if (isinf(size))
        return sign | 0x7c00;
    if (size < 0x1p-14) /* zero and subnormals count in units of 2^-24 */
        return (uint16_t)(sign | (int)(size * 0x1p24));
    int exponent;
    const double fraction = frexp(size, &exponent); /* in [0.5, 1) */
    return (uint16_t)(sign | (exponent + 14) << 10 | (int)((2 * fraction - 1) * 1024));
}

static double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31)
        size = fraction ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}

void problem_store(rafter_dtype dtype, char *to, double x) {
    if (dtype == RAFTER_I64) {
        const int64_t v = (int64_t)x;
        memcpy(to, &v, 8);
    } else if (dtype == RAFTER_I32) {
        const int32_t v = (int32_t)x;
        memcpy(to, &v, 4);
    } else if (dtype == RAFTER_U8) {
        *(unsigned char *)to = (unsigned char)x;
    } else if (dtype == RAFTER_F16) {
        const uint16_t bits = half_bits(x);
        memcpy(to, &bits, 2);
    } else {
        const float v = (float)x;
        uint32_t bits;
        memcpy(&bits, &v, 4);
        if (dtype == RAFTER_F32) {
            memcpy(to, &bits, 4);
        } else {
            const uint16_t high = (uint16_t)(isnan(v) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            memcpy(to, &high, 2);
        }
    }
}

double problem_load(rafter_dtype dtype, const char *from) {
    uint16_t half = 0;
    uint32_t word = 0;
    int64_t wide = 0;
    float real;
    switch (dtype) {
    case RAFTER_U8: return *(const unsigned char *)from;
    case RAFTER_I64: memcpy(&wide, from, 8); return (double)wide;
    case RAFTER_I32: memcpy(&word, from, 4); return (int32_t)word;
    case RAFTER_F16: memcpy(&half, from, 2); return half_value(half);
    case RAFTER_BF16:
        memcpy(&half, from, 2);
        word = (uint32_t)half << 16;
        break;
    case RAFTER_F32: memcpy(&word, from, 4); break;
    }
    memcpy(&real, &word, 4);
    return real;
}

uint64_t problem_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double problem_normal(uint64_t bits) {
    const double sum = (double)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    return (sum / 65536.0 - 2.0) * 1.7320508075688772;
}
