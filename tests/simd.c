/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector vocabulary against scalar code. Compiled once per ISA level; exits with 77, which ctest
 * counts as skipped, if this machine does not run the level.
 */
#include <math.h>
#include <stdio.h>

#include "core/cpu.h"
#include "simd/sincos.h"
#include "simd/softmax.h"
#include "simd/transpose.h"

static int failures;

#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition) && failures++ < 20) {                                                                         \
            printf("FAIL line %d: %s: ", __LINE__, #condition);                                                        \
            printf(__VA_ARGS__);                                                                                       \
            printf("\n");                                                                                              \
        }                                                                                                              \
    } while (0)

static uint32_t bits_of(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float a;
    memcpy(&a, &bits, sizeof a);
    return a;
}

static bool same(float a, float b) {
    return bits_of(a) == bits_of(b) || (isnan(a) && isnan(b));
}

/* ---- 16-bit elements ------------------------------------------------------------------------- */

static float widened(int dtype, uint16_t h) {
    if (dtype == RAFTER_BF16)
        return float_of((uint32_t)h << 16);
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                                           : ldexpf((float)fraction, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

/* The nearest of all 16-bit floats, found by comparing with the neighbours of a truncated one. */
static uint16_t narrowed(int dtype, float a) {
    const uint32_t sign = bits_of(a) >> 16 & 0x8000;
    const double magnitude = fabs((double)a);
    uint16_t below = 0; /* the largest that is not above the magnitude */
    for (int bit = 14; bit >= 0; bit--) {
        const uint16_t trial = (uint16_t)(below | 1 << bit);
        if ((double)widened(dtype, trial) <= magnitude)
            below = trial;
    }
    const float largest = dtype == RAFTER_BF16 ? float_of(0x7f7f0000) : 65504.0f;
    const double low = (double)widened(dtype, below);
    const double step = low == (double)largest ? low - (double)widened(dtype, (uint16_t)(below - 1))
                                               : (double)widened(dtype, (uint16_t)(below + 1)) - low;
    const double rest = (magnitude - low) / step;
    const bool up = isfinite(low) && (rest > 0.5 || (rest == 0.5 && below & 1));
    return (uint16_t)(sign | (uint32_t)(below + up));
}

V_INLINE void narrow(int dtype) {
    float in[2 * V_LANES];
    uint16_t one[2 * V_LANES], two[2 * V_LANES], pair[2 * V_LANES];
    for (uint64_t first = 0; first < UINT64_C(1) << 32; first += (uint64_t)2 * V_LANES * 99991) {
        for (int i = 0; i < 2 * V_LANES; i++) /* also ties, of either kind, and what is close to them */
            in[i] = float_of((uint32_t)(first + (uint64_t)i * 99991) & (i % 4 == 1 ? 0xfffff000u : 0xffffffffu));
        in[0] = float_of((bits_of(in[0]) & 0xffff0000u) | 0x8000);
        const vf a = v_load(RAFTER_F32, in), b = v_load(RAFTER_F32, in + V_LANES);
        v_store(dtype, one, a);
        v_store(dtype, one + V_LANES, b);
        v_store2(dtype, two, a, b);
        vf even = a, odd = b;
        v_pair(dtype, &even, &odd);
        v_store_pair(dtype, pair, even, odd);
        for (int i = 0; i < 2 * V_LANES; i++) {
            const float wanted = isnan(in[i]) ? NAN : widened(dtype, narrowed(dtype, in[i]));
            const uint32_t bits = bits_of(in[i]);
            EXPECT(same(widened(dtype, one[i]), wanted), "%08x gives %04x", bits, one[i]);
            EXPECT(same(widened(dtype, two[i]), wanted), "%08x gives %04x", bits, two[i]);
            EXPECT(same(widened(dtype, pair[i]), wanted) || (isnan(in[i]) && isinf(widened(dtype, pair[i]))),
                   "%08x gives %04x", bits, pair[i]);
        }
    }
}

V_INLINE void widen(int dtype) {
    uint16_t in[2 * V_LANES];
    float out[2 * V_LANES];
    for (int first = 0; first < 65536; first += 2 * V_LANES) {
        for (int i = 0; i < 2 * V_LANES; i++)
            in[i] = (uint16_t)(first + i);
        vf a, b;
        v_load_pair(dtype, in, &a, &b);
        v_unpair(dtype, &a, &b);
        v_store(RAFTER_F32, out, a);
        v_store(RAFTER_F32, out + V_LANES, b);
        const vf low = v_load(dtype, in);
        for (int i = 0; i < 2 * V_LANES; i++) {
            EXPECT(same(out[i], widened(dtype, in[i])), "%04x gives %a", in[i], (double)out[i]);
            EXPECT(i >= V_LANES || same(low[i % V_LANES], widened(dtype, in[i])), "%04x", in[i]);
        }
    }
}

/* ---- parts of vectors ------------------------------------------------------------------------ */

V_INLINE void parts(int dtype) {
    unsigned char from[V_LANES * 4], to[V_LANES * 4 + 4];
    const int64_t bytes = v_bytes(dtype);
    for (int i = 0; i < V_LANES; i++)
        v_put(dtype, from + i * bytes, (float)(i + 1));
    for (int64_t n = 0; n <= V_LANES; n++) {
        const vf a = v_load_part(dtype, from + (V_LANES - n) * bytes, n, -INFINITY);
        for (int i = 0; i < V_LANES; i++)
            EXPECT(a[i] == (i < n ? (float)(V_LANES - n + i + 1) : -INFINITY), "n %d, lane %d: %g", (int)n, i,
                   (double)a[i]);
        memset(to, 0x5a, sizeof to);
        v_store_part(dtype, to, a, n);
        EXPECT(memcmp(to, from + (V_LANES - n) * bytes, (size_t)(n * bytes)) == 0, "n %d", (int)n);
        for (int64_t i = n * bytes; i < (int64_t)sizeof to; i++)
            EXPECT(to[i] == 0x5a, "n %d: byte %d is overwritten", (int)n, (int)i);
    }
}

V_INLINE void turned(int dtype) {
    enum { MOST = 3 * V_LANES };
    static unsigned char rows[MOST * MOST * 4 + V_LANES * 4], back[sizeof rows];
    static float columns[MOST * MOST];
    for (int64_t n = 1; n <= MOST; n++)
        for (int64_t count = 1; count <= MOST; count++)
            for (int64_t pitch = n; pitch <= n + 1 && pitch * count <= MOST * MOST; pitch++) {
                for (int64_t i = 0; i < pitch * count; i++)
                    v_put(dtype, rows + i * v_bytes(dtype), (float)(i % 251));
                v_rows_to_columns(dtype, (const char *)rows, pitch, count, n, columns, MOST);
                for (int64_t r = 0; r < count; r++)
                    for (int64_t c = 0; c < n; c++)
                        EXPECT(columns[c * MOST + r] == (float)((r * pitch + c) % 251), "%d x %d", (int)count, (int)n);
                memcpy(back, rows, sizeof back);
                for (int64_t r = 0; r < count; r++)
                    memset(back + r * pitch * v_bytes(dtype), 0, (size_t)(n * v_bytes(dtype)));
                v_columns_to_rows(dtype, columns, MOST, count, n, (char *)back, pitch);
                EXPECT(memcmp(back, rows, (size_t)(pitch * count * v_bytes(dtype))) == 0, "%d x %d", (int)count,
                       (int)n);
            }
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static void compare(void) {
    static const float values[] = {NAN, -INFINITY, -1.5f, -0.0f, 0.0f, 1.0f, 2.5f, 0x1p30f, INFINITY};
    enum { COUNT = sizeof values / sizeof *values };
    for (int i = 0; i < COUNT; i++) {
        const float a = values[i];
        EXPECT(isnan(a) ? isnan(v_floor(v_set(a))[0]) : v_floor(v_set(a))[0] == floorf(a), "%g", (double)a);
        for (int k = 0; k < COUNT; k++) {
            const float b = values[k];
            const float max = v_max(v_set(a), v_set(b))[0], min = v_min(v_set(a), v_set(b))[0];
            EXPECT(isnan(a) || isnan(b) ? same(max, b) : max == (a > b ? a : b), "%g %g", (double)a, (double)b);
            EXPECT(isnan(a) || isnan(b) ? same(min, b) : min == (a < b ? a : b), "%g %g", (double)a, (double)b);
            const float bound = v_max_nan(v_set(a), v_set(b))[0], cap = v_min_nan(v_set(a), v_set(b))[0];
            EXPECT(isnan(a) || isnan(b) ? isnan(bound) || same(bound, b) : bound == max, "%g %g", (double)a, (double)b);
            EXPECT(isnan(a) || isnan(b) ? isnan(cap) || same(cap, b) : cap == min, "%g %g", (double)a, (double)b);
            EXPECT(!isnan(b) || (isnan(bound) && isnan(cap)), "%g %g", (double)a, (double)b);
            EXPECT(same(v_select_negative(v_set(b), v_set(1.0f), v_set(2.0f))[0], signbit(b) ? 1.0f : 2.0f), "%g",
                   (double)b);
        }
    }
    for (unsigned bits = 0; bits < 1u << V_LANES; bits++)
        EXPECT(v_bits(v_from_bits(bits)) == bits, "%x", bits);
    vf a;
    for (int i = 0; i < V_LANES; i++)
        a[i] = (float)((i * 5 + 3) % V_LANES);
    EXPECT(v_hmax(a) == V_LANES - 1 && v_sum(a) == V_LANES * (V_LANES - 1) / 2, "%g %g", (double)v_hmax(a),
           (double)v_sum(a));
    vd low, high;
    v_to_d(a, &low, &high);
    const vf again = v_from_d(low, high);
    EXPECT(memcmp(&again, &a, sizeof a) == 0 && low[1] == (double)a[1] && high[0] == (double)a[V_LANES / 2], "doubles");
}

/* The largest of a block, wherever it is; a NaN elsewhere either stays unseen or gives NaN. */
V_INLINE void peaks(int dtype) {
    unsigned char block[8 * V_LANES * 4];
    for (int sign = -1; sign <= 1; sign += 2)
        for (int at = 0; at < 8 * V_LANES; at++)
            for (int nan = 0; nan < 2; nan++) {
                for (int i = 0; i < 8 * V_LANES; i++)
                    v_put(dtype, block + i * v_bytes(dtype), sign < 0 ? (float)(-i - 2) : (float)(i % 7) - 3.0f);
                const float largest = sign < 0 ? -0.5f : 5.0f;
                v_put(dtype, block + at * v_bytes(dtype), largest);
                if (nan)
                    v_put(dtype, block + (at + 1) % (8 * V_LANES) * v_bytes(dtype), NAN);
                struct v_peak peak = v_peak_empty();
                for (int i = 0; i < 8 * V_LANES; i += 2 * V_LANES) {
                    vf a, b;
                    v_load_pair(dtype, block + i * v_bytes(dtype), &a, &b);
                    v_peak_add(dtype, &peak, block + i * v_bytes(dtype), a, b);
                }
                const float found = v_peak_value(dtype, &peak);
                EXPECT(found == largest || (nan && isnan(found)), "at %d: %g", at, (double)found);
                EXPECT(v_max_row(dtype, block, 8 * V_LANES) == largest, "at %d", at);
            }
}

/* |got - wanted| in units in the last place of wanted. */
static double ulps(float got, double wanted) {
    if (same(got, (float)wanted))
        return 0;
    int exponent;
    frexp(wanted, &exponent);
    return fabs((double)got - wanted) / ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

static void functions(void) {
    static const float limits[] = {-INFINITY, INFINITY, NAN, -200.0f, 200.0f};
    for (int i = 0; i < 5; i++) {
        EXPECT(same(v_exp2(v_set(limits[i]))[0], exp2f(limits[i])), "%g", (double)limits[i]);
        EXPECT(same(v_exp(v_set(limits[i]))[0], expf(limits[i])), "%g", (double)limits[i]);
        EXPECT(same(v_tanh(v_set(limits[i]))[0], tanhf(limits[i])), "%g", (double)limits[i]);
    }
    double worst[4] = {0};
    for (float x = -103.0f; x < 88.0f; x += 0.0137f) {
        const struct v_base base = v_base_at(x + 1.0f);
        const float nearby = x + 0.37f; /* what is wrong with both terms cancels in a quotient */
        const double quotient = (double)v_term(nearby, &base) / (double)v_term(x, &base);
        const double of[] = {ulps(v_exp2(v_set(x))[0], exp2((double)x)), ulps(v_exp(v_set(x))[0], exp((double)x)),
                             ulps(v_tanh(v_set(x / 16))[0], tanh((double)(x / 16))),
                             ulps((float)quotient, exp((double)nearby - (double)x))};
        for (int k = 0; k < 4; k++)
            worst[k] = fmax(worst[k], of[k]);
    }
    printf("exp2 %.2f, exp %.2f, tanh %.2f, quotients of terms %.2f ulp\n", worst[0], worst[1], worst[2], worst[3]);
    EXPECT(worst[0] <= 3.0 && worst[1] <= 2.0 && worst[2] <= 2.0 && worst[3] <= 4.0, "too inaccurate");
}

/* Sines and cosines for 16-bit results: near zeros and tiny angles, and the same bits whichever position is first. */
static void angles(void) {
#if V_FMA
    enum { ROWS = 8, N = 4 * V_LANES };
    static const int64_t starts[] = {0, 1, -3, 355, 65536, 1000000, -1000000, (1 << 26) - 4, 1ll << 40};
    static double theta[N];
    static uint64_t step[N];
    static float sine[ROWS * N], cosine[ROWS * N], alone[2 * N];
    float largest = 0;
    for (int i = 0; i < N; i++) {
        const float tiny = ldexpf(1.0f + (float)i / N, -3 * i), tenths = 0.1f * (float)(i - N / 2);
        const float quarters = 1.57079632679f * (float)i;
        const float value = i % 4 == 0 ? tiny : i % 4 == 1 ? tenths : i % 4 == 2 ? quarters : 0.5f + (float)i / N;
        theta[i] = (double)value;
        largest = fmaxf(largest, fabsf(value));
    }
    for (int i = 0; i < N; i += V_LANES / 2) {
        const vul steps = v_turn_step(v_load_d(theta + i));
        memcpy(step + i, &steps, sizeof steps);
    }
    double worst = 0;
    for (unsigned k = 0; k < sizeof starts / sizeof *starts; k++) {
        v_sincos_rows(theta, step, (double)largest, starts[k], ROWS, N, sine, cosine);
        for (int r = 0; r < ROWS; r++) {
            float exact[2 * N];
            v_sincos_row(theta, (double)largest, starts[k] + r, N, exact, exact + N);
            v_sincos_rows(theta, step, (double)largest, starts[k] + r, 1, N, alone, alone + N);
            EXPECT(memcmp(alone, sine + r * N, sizeof *sine * N) == 0, "%lld", (long long)starts[k] + r);
            EXPECT(memcmp(alone + N, cosine + r * N, sizeof *sine * N) == 0, "%lld", (long long)starts[k] + r);
            for (int i = 0; i < 2 * N; i++) {
                const double off = fabs((double)alone[i] - (double)exact[i]), of = fabs((double)exact[i]);
                worst = fmax(worst, of > 0 ? off / of : off > 0);
            }
        }
    }
    printf("sines and cosines for 16 bits: relative error %.2g\n", worst);
    EXPECT(worst <= 4e-5, "too inaccurate");
#endif
}

static int all(void) {
    for (int dtype = 0; dtype < 3; dtype++) {
        V_FOR_DTYPE(dtype, d, {
            parts(d);
            turned(d);
            peaks(d);
        });
    }
    narrow(RAFTER_BF16);
    narrow(RAFTER_F16);
    widen(RAFTER_BF16);
    widen(RAFTER_F16);
    compare();
    functions();
    angles();
    printf("%d failures\n", failures);
    return failures != 0;
}

#define LEVEL_(isa) RAFTER_ISA_##isa
#define LEVEL(isa) LEVEL_(isa)

int main(void) {
    if (rafter_cpu_isa() < LEVEL(RAFTER_ISA)) {
        printf("this machine does not run the level\n");
        return 77;
    }
    return all();
}
