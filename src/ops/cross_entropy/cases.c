/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "harness/map.h"
#include "harness/oracle.h"
#include "ops/loss_cases.h"

/* ---- test cases ------------------------------------------------------------------------------ */

struct options {
    struct loss_case loss;
    bool in_place; /* dlogits is logits */
};

static const struct options plain = {{.name = "plain", .extras = true}, false};

/* In addition to loss_cases. */
static const struct options option_sets[] = {
    {{.name = "in place", .extras = true, .ignored = SOME_IGNORED}, true},
    {{.name = "in place, no lse", .without_lse = true, .smoothing = 0.1f}, true},
    {{.name = "in place, softcap", .softcap = 3, .dloss = true}, true},
    {{.name = "in place, all but the mean",
      .smoothing = 0.4f,
      .z_loss = 0.005f,
      .softcap = 4,
      .scale = 0.5f,
      .ignored = SOME_IGNORED,
      .class_weight = true,
      .row_weight = true,
      .reduction = RAFTER_NONE,
      .dloss = true,
      .extras = true,
      .without_lse = true},
     true},
};

/* Logits; the last size is V. */
struct shape {
    int ndim;
    int64_t size[4];
};

/* Each with the plain options. Rows of more than 16384 columns are split into chunks, for some
 * options rows of more than 2048. */
static const struct shape shapes[] = {
    {2, {1, 1}},
    {2, {3, 1}},
    {2, {2, 2}},
    {2, {3, 3}},
    {2, {3, 7}},
    {2, {3, 8}},
    {2, {3, 9}},
    {2, {2, 15}},
    {2, {2, 16}},
    {2, {2, 17}},
    {2, {2, 31}},
    {2, {2, 32}},
    {2, {2, 33}},
    {2, {2, 63}},
    {2, {2, 64}},
    {2, {2, 65}},
    {2, {5, 127}},
    {2, {5, 129}},
    {2, {4, 1023}},
    {2, {4, 1024}},
    {2, {4, 1025}},
    {2, {3, 5000}},
    {2, {0, 7}},
    {1, {9}},
    {1, {300}},
    {3, {2, 3, 33}},
    {4, {2, 1, 3, 17}},
    {2, {300, 3}},
    {2, {1, 40000}},
    {2, {2, 16385}},
    /* so many rows that they run in tiles; with the classes contiguous and, in the transposed
     * layout, with the rows adjacent */
    {2, {601, 2}},
    {2, {270, 8}},
    {2, {150, 16}},
    {2, {90, 33}},
    {2, {70, 150}},
    {2, {50, 300}},
    {3, {2, 40, 9}},
    {4, {3, 5, 7, 6}},
    /* transposed: slabs of 2, 7, 64 and 513 rows side by side, of short and of long rows */
    {3, {3, 2, 333}},
    {3, {2, 7, 200}},
    {3, {2, 64, 100}},
    {3, {2, 70, 21}},
    {2, {513, 70}},
};

/* Each with every set of options; the first is also checked by finite differences. */
static const struct shape option_shapes[] = {{2, {4, 9}},   {3, {2, 5, 37}}, {2, {2, 2051}},
                                             {2, {70, 21}}, {3, {20, 2, 7}}, {3, {10, 2, 7}}};

/* A few sets of options on long rows, which take all code paths at once. */
static const struct {
    const char *options;
    struct shape shape;
} long_rows[] = {
    {"all", {2, {1, 33000}}},
    {"class weights, smoothing", {2, {2, 16390}}},
    {"in place, no lse", {2, {1, 20000}}},
};

/* In one dtype each. */
static const struct single {
    rafter_dtype dtype;
    struct options options;
    struct shape shape;
    int64_t sample; /* not 0: large */
    bool for_cuda;
} singles[] = {
    /* no classes: every label must be ignored */
    {RAFTER_F32, {{.name = "no classes", .ignored = ALL_IGNORED, .extras = true}, false}, {2, {2, 0}}, 0, false},
    /* rows of more than one chunk, so many that each row is handled by one thread */
    {RAFTER_BF16,
     {{.name = "many long rows", .ignored = SOME_IGNORED, .dloss = true}, false},
     {2, {66, 16390}},
     0,
     false},
    {RAFTER_BF16, {{.name = "past 2^31", .reduction = RAFTER_SUM}, false}, {2, {16500, 131072}}, 1031, false},
    /* basic calls whose rows are whole packs: with every special value */
    {RAFTER_BF16, {{.name = "basic", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {35, 128}}, 0, false},
    {RAFTER_F16, {{.name = "basic", .without_lse = true, .narrow = true}, true}, {2, {35, 200}}, 0, false},
    {RAFTER_F32, {{.name = "basic", .reduction = RAFTER_SUM, .ignored = SOME_IGNORED}, true}, {2, {35, 404}}, 0, false},
    {RAFTER_BF16, {{.name = "basic", .smoothing = 0.1f, .ignored = SOME_IGNORED}, false}, {2, {35, 200}}, 0, false},
    {RAFTER_F32, {{.name = "basic", .smoothing = 0.3f, .reduction = RAFTER_SUM}, false}, {2, {11, 500}}, 0, false},
    {RAFTER_BF16,
     {{.name = "basic", .reduction = RAFTER_NONE, .ignored = SOME_IGNORED}, false},
     {2, {35, 200}},
     0,
     false},
    {RAFTER_F16, {{.name = "basic", .reduction = RAFTER_NONE, .narrow = true}, false}, {2, {9, 4104}}, 0, false},
    {RAFTER_BF16, {{.name = "basic", .reduction = RAFTER_NONE}, false}, {2, {20001, 24}}, 0, true},
    {RAFTER_F32, {{.name = "basic", .reduction = RAFTER_NONE, .smoothing = 0.1f}, false}, {2, {21, 64}}, 0, false},
    /* rows larger than shared memory, for clusters of several sizes, with different alignments; so
     * many rows that a block takes several; so many labels that a separate kernel counts them */
    {RAFTER_BF16, {{.name = "long", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {1, 1 << 20}}, 0, true},
    {RAFTER_BF16, {{.name = "long", .ignored = SOME_IGNORED}, false}, {2, {7, 65536}}, 0, true},
    {RAFTER_F32, {{.name = "long", .smoothing = 0.1f}, false}, {2, {3, 151939}}, 0, true},
    {RAFTER_BF16, {{.name = "long", .without_lse = true}, true}, {2, {5, 131072}}, 0, true},
    {RAFTER_F16,
     {{.name = "long, all", .smoothing = 0.1f, .softcap = 5, .scale = 2, .class_weight = true, .extras = true}, false},
     {2, {3, 65540}},
     0,
     true},
    {RAFTER_BF16, {{.name = "many", .ignored = SOME_IGNORED}, false}, {2, {500, 2051}}, 0, true},
    /* enough rows to keep them in shared memory, in every block shape: three blocks per SM, two,
     * one, and one with more threads */
    {RAFTER_BF16,
     {{.name = "in shared memory", .ignored = SOME_IGNORED, .dloss = true}, false},
     {2, {70, 8200}},
     0,
     true},
    {RAFTER_F16,
     {{.name = "in shared memory", .without_lse = true, .z_loss = 0.005f, .scale = 0.5f}, true},
     {2, {70, 50001}},
     0,
     true},
    {RAFTER_F32,
     {{.name = "in shared memory", .smoothing = 0.1f, .row_weight = true}, false},
     {2, {70, 40000}},
     0,
     true},
    {RAFTER_F32, {{.name = "in shared memory", .ignored = SOME_IGNORED}, false}, {2, {70, 70001}}, 0, true},
    {RAFTER_F32, {{.name = "many"}, false}, {2, {2100, 300}}, 0, true},
    /* basic calls whose rows are whole packs: in the registers of a warp, in a block, in parts;
     * with lse and without */
    {RAFTER_BF16, {{.name = "basic", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {2100, 1024}}, 0, true},
    {RAFTER_F16, {{.name = "basic", .reduction = RAFTER_SUM, .narrow = true}, true}, {2, {301, 1000}}, 0, true},
    {RAFTER_F32, {{.name = "basic", .ignored = SOME_IGNORED, .narrow = true}, false}, {2, {301, 1000}}, 0, true},
    {RAFTER_BF16, {{.name = "basic", .without_lse = true, .ignored = SOME_IGNORED}, true}, {2, {9, 2048}}, 0, true},
    {RAFTER_BF16,
     {{.name = "basic", .ignored = ALL_IGNORED, .zero_if_all_ignored = true}, false},
     {2, {9, 8}},
     0,
     true},
    {RAFTER_BF16, {{.name = "basic", .denominator = true, .ignored = SOME_IGNORED}, true}, {2, {301, 4104}}, 0, true},
    {RAFTER_F16, {{.name = "basic", .without_lse = true, .ignored = SOME_IGNORED}, false}, {2, {70, 8200}}, 0, true},
    {RAFTER_F32,
     {{.name = "basic", .ignored = ALL_IGNORED, .zero_if_all_ignored = true}, false},
     {2, {301, 4100}},
     0,
     true},
    {RAFTER_F32, {{.name = "basic", .ignored = SOME_IGNORED}, false}, {2, {1024, 8200}}, 0, true},
    /* so many basic rows that no block counts all labels: several rows per warp */
    {RAFTER_BF16, {{.name = "short", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {20001, 128}}, 0, true},
    {RAFTER_F16, {{.name = "short", .without_lse = true, .ignored = SOME_IGNORED}, true}, {2, {40001, 24}}, 0, true},
    {RAFTER_F32, {{.name = "short", .reduction = RAFTER_SUM, .narrow = true}, true}, {2, {20001, 100}}, 0, true},
    {RAFTER_BF16, {{.name = "short", .denominator = true, .ignored = SOME_IGNORED}, false}, {2, {16501, 56}}, 0, true},
    {RAFTER_F16, {{.name = "short", .ignored = SOME_IGNORED}, true}, {2, {3001, 1024}}, 0, true},
    {RAFTER_BF16, {{.name = "short", .without_lse = true, .ignored = SOME_IGNORED}, false}, {2, {3001, 512}}, 0, true},
    {RAFTER_BF16,
     {{.name = "short", .ignored = ALL_IGNORED, .zero_if_all_ignored = true}, false},
     {2, {20001, 8}},
     0,
     true},
    {RAFTER_BF16, {{.name = "many", .ignored = SOME_IGNORED}, false}, {2, {70001, 5}}, 0, true},
    /* so many rows that a warp takes a batch of them: 4, 8 and 32 lanes per row, with edges */
    {RAFTER_BF16,
     {{.name = "batches", .ignored = SOME_IGNORED, .row_weight = true}, false},
     {2, {100003, 61}},
     0,
     true},
    {RAFTER_F16,
     {{.name = "batches, extras", .smoothing = 0.1f, .class_weight = true, .softcap = 5, .extras = true}, false},
     {2, {30001, 133}},
     0,
     true},
    {RAFTER_BF16, {{.name = "batches", .smoothing = 0.1f, .ignored = SOME_IGNORED}, false}, {2, {1033, 2051}}, 0, true},
    {RAFTER_F32, {{.name = "batches", .extras = true, .ignored = SOME_IGNORED}, false}, {2, {1100, 1031}}, 0, true},
    {RAFTER_F16, {{.name = "batches", .z_loss = 0.005f, .reduction = RAFTER_NONE}, false}, {2, {9001, 1031}}, 0, true},
    {RAFTER_BF16, {{.name = "many", .smoothing = 0.1f, .class_weight = true}, false}, {2, {70001, 17}}, 0, true},
    /* chunks of short rows: 2, 4, 8, 16 and 32 lanes per row, with every kind of statistics; logits within half
     * the softcap, beyond it, and a softcap that does not bound exponentials */
    {RAFTER_BF16, {{.name = "chunks", .softcap = 30, .smoothing = 0.1f}, false}, {2, {2001, 64}}, 0, true},
    {RAFTER_F16, {{.name = "chunks", .softcap = 5, .ignored = SOME_IGNORED}, false}, {2, {3001, 127}}, 0, true},
    {RAFTER_F32, {{.name = "chunks", .softcap = 70}, false}, {2, {1501, 100}}, 0, true},
    {RAFTER_F32, {{.name = "chunks", .softcap = 8, .scale = 2}, false}, {2, {1501, 37}}, 0, true},
    {RAFTER_F32, {{.name = "chunks", .smoothing = 0.1f, .class_weight = true}, false}, {2, {1501, 33}}, 0, true},
    {RAFTER_F32, {{.name = "chunks", .smoothing = 0.1f}, false}, {2, {901, 101}}, 0, true},
    {RAFTER_BF16, {{.name = "chunks", .z_loss = 0.005f, .ignored = SOME_IGNORED}, false}, {2, {701, 501}}, 0, true},
    {RAFTER_F16, {{.name = "chunks", .scale = 2, .row_weight = true}, false}, {2, {601, 1000}}, 0, true},
    {RAFTER_F16,
     {{.name = "chunks, all", .smoothing = 0.1f, .softcap = 5, .class_weight = true, .extras = true}, false},
     {2, {601, 450}},
     0,
     true},
    {RAFTER_BF16,
     {{.name = "chunks, all", .smoothing = 0.1f, .softcap = 5, .class_weight = true, .extras = true}, false},
     {2, {301, 1000}},
     0,
     true},
    /* transposed: so many rows side by side, not whole packs, that a block takes 128 of them */
    {RAFTER_BF16, {{.name = "columns", .z_loss = 0.005f, .ignored = SOME_IGNORED}, false}, {2, {515, 66}}, 0, false},
    {RAFTER_F32, {{.name = "columns", .z_loss = 0.005f}, false}, {2, {4099, 9}}, 0, false},
    /* transposed: long rows side by side, in several windows; so many packs that a thread takes several */
    {RAFTER_BF16, {{.name = "windows", .smoothing = 0.1f, .ignored = SOME_IGNORED}, false}, {2, {521, 701}}, 0, true},
    {RAFTER_F16, {{.name = "windows", .without_lse = true, .z_loss = 0.005f}, true}, {3, {2, 130, 1501}}, 0, true},
    {RAFTER_BF16, {{.name = "windows", .ignored = SOME_IGNORED}, false}, {2, {4099, 4003}}, 0, true},
    /* transposed: basic rows side by side, four to a thread; in one step, in several, and in parts */
    {RAFTER_BF16, {{.name = "segments", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {4100, 17}}, 0, false},
    {RAFTER_F32, {{.name = "segments", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {192, 2}}, 0, false},
    {RAFTER_BF16, {{.name = "segments", .ignored = SOME_IGNORED, .narrow = true}, true}, {2, {200, 5}}, 0, false},
    {RAFTER_F16, {{.name = "segments", .reduction = RAFTER_NONE, .dloss = true}, false}, {2, {128, 3}}, 0, false},
    {RAFTER_BF16, {{.name = "segments", .without_lse = true}, true}, {2, {160, 7}}, 0, false},
    {RAFTER_BF16, {{.name = "segments", .ignored = SOME_IGNORED}, false}, {2, {18436, 9}}, 0, false},
    /* contiguous: very short rows through shared memory */
    {RAFTER_F16, {{.name = "tiny", .reduction = RAFTER_NONE, .dloss = true}, false}, {2, {8195, 7}}, 0, true},
    {RAFTER_BF16, {{.name = "tiny", .ignored = SOME_IGNORED, .narrow = true}, true}, {2, {150000, 21}}, 0, true},
    {RAFTER_F16,
     {{.name = "tiny, all",
       .smoothing = 0.1f,
       .z_loss = 0.005f,
       .softcap = 5,
       .class_weight = true,
       .row_weight = true,
       .ignored = SOME_IGNORED,
       .extras = true},
      false},
     {2, {8195, 3}},
     0,
     true},
    {RAFTER_F32, {{.name = "tiny", .softcap = 8, .scale = 0.5f, .without_lse = true}, true}, {2, {8200, 21}}, 0, true},
    {RAFTER_BF16,
     {{.name = "tiny", .smoothing = 0.1f, .reduction = RAFTER_NONE, .dloss = true, .extras = true}, false},
     {2, {8193, 31}},
     0,
     true},
    {RAFTER_F32, {{.name = "segments", .without_lse = true}, true}, {2, {18436, 9}}, 0, false},
    /* kernels for basic calls that know class weights and label smoothing */
    {RAFTER_BF16, {{.name = "tiny", .class_weight = true, .ignored = SOME_IGNORED}, false}, {2, {8195, 21}}, 0, true},
    {RAFTER_F32,
     {{.name = "tiny", .class_weight = true, .reduction = RAFTER_NONE, .dloss = true, .without_lse = true}, false},
     {2, {8200, 10}},
     0,
     true},
    {RAFTER_F16, {{.name = "tiny", .smoothing = 0.1f, .denominator = true}, true}, {2, {8195, 6}}, 0, true},
    {RAFTER_BF16,
     {{.name = "segments", .class_weight = true, .ignored = SOME_IGNORED, .dloss = true}, false},
     {2, {4100, 17}},
     0,
     false},
    {RAFTER_F16,
     {{.name = "segments", .class_weight = true, .reduction = RAFTER_NONE, .dloss = true}, false},
     {2, {128, 3}},
     0,
     false},
    {RAFTER_F32, {{.name = "segments", .smoothing = 0.1f, .ignored = SOME_IGNORED}, false}, {2, {192, 2}}, 0, false},
    {RAFTER_BF16, {{.name = "segments", .smoothing = 0.2f, .without_lse = true}, true}, {2, {160, 7}}, 0, false},
    {RAFTER_BF16, {{.name = "warps", .class_weight = true, .ignored = SOME_IGNORED}, false}, {2, {1500, 64}}, 0, true},
    {RAFTER_F32, {{.name = "warps", .class_weight = true, .without_lse = true}, true}, {2, {300, 600}}, 0, true},
    {RAFTER_F16, {{.name = "warps", .smoothing = 0.1f, .dloss = true}, true}, {2, {301, 1000}}, 0, true},
    {RAFTER_BF16, {{.name = "short", .class_weight = true, .ignored = SOME_IGNORED}, false}, {2, {20001, 32}}, 0, true},
    {RAFTER_F16, {{.name = "short", .class_weight = true, .without_lse = true}, true}, {2, {16400, 72}}, 0, true},
    {RAFTER_F32, {{.name = "short", .smoothing = 0.1f, .ignored = SOME_IGNORED}, false}, {2, {17001, 12}}, 0, true},
    {RAFTER_BF16, {{.name = "short", .smoothing = 0.1f, .without_lse = true}, true}, {2, {16501, 136}}, 0, true},
    /* and both at once; tiny rows with other options too, and a million of them: several to a thread */
    {RAFTER_BF16,
     {{.name = "warps", .class_weight = true, .smoothing = 0.1f, .ignored = SOME_IGNORED}, false},
     {2, {301, 1000}},
     0,
     true},
    {RAFTER_F32,
     {{.name = "warps", .class_weight = true, .smoothing = 0.1f, .without_lse = true}, true},
     {2, {300, 600}},
     0,
     true},
    {RAFTER_BF16,
     {{.name = "segments", .class_weight = true, .smoothing = 0.1f, .ignored = SOME_IGNORED, .dloss = true}, false},
     {2, {4100, 17}},
     0,
     false},
    {RAFTER_F32,
     {{.name = "segments", .class_weight = true, .smoothing = 0.2f, .without_lse = true}, true},
     {2, {201, 5}},
     0,
     false},
    {RAFTER_F16,
     {{.name = "tiny", .class_weight = true, .smoothing = 0.1f, .z_loss = 1e-3f, .ignored = SOME_IGNORED}, false},
     {2, {8195, 3}},
     0,
     true},
    {RAFTER_BF16,
     {{.name = "tiny", .softcap = 2, .smoothing = 0.1f, .reduction = RAFTER_NONE, .dloss = true}, false},
     {2, {8197, 9}},
     0,
     true},
    {RAFTER_BF16, {{.name = "tiny", .ignored = SOME_IGNORED}, false}, {2, {1048601, 2}}, 0, true},
    {RAFTER_F16, {{.name = "tiny", .softcap = 3, .class_weight = true}, true}, {2, {1048601, 5}}, 0, true},
    /* basic rows at any alignment: a block for each, in parts, and so many that no block counts all labels */
    {RAFTER_BF16, {{.name = "unaligned", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {301, 5003}}, 0, true},
    {RAFTER_F32, {{.name = "unaligned", .ignored = SOME_IGNORED}, true}, {2, {1025, 601}}, 0, true},
    {RAFTER_F16, {{.name = "unaligned", .reduction = RAFTER_SUM, .narrow = true}, false}, {2, {5, 70001}}, 0, true},
    {RAFTER_BF16, {{.name = "unaligned", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {16401, 505}}, 0, true},
    {RAFTER_BF16, {{.name = "unaligned", .ignored = SOME_IGNORED}, false}, {2, {16401, 3079}}, 0, true},
    {RAFTER_BF16,
     {{.name = "unaligned", .smoothing = 0.1f, .ignored = SOME_IGNORED, .dloss = true}, false},
     {2, {301, 5003}},
     0,
     true},
    {RAFTER_F32, {{.name = "basic", .class_weight = true, .ignored = SOME_IGNORED}, false}, {2, {300, 4100}}, 0, true},
    {RAFTER_F16, {{.name = "unaligned", .class_weight = true}, true}, {2, {1100, 1503}}, 0, true},
    {RAFTER_BF16, {{.name = "basic", .smoothing = 0.1f, .reduction = RAFTER_SUM}, true}, {2, {16390, 3080}}, 0, true},
    /* few rows at any alignment: in parts, over the logits, and with a dloss for each */
    {RAFTER_BF16,
     {{.name = "few", .smoothing = 0.1f, .z_loss = 0.005f, .softcap = 5, .class_weight = true, .ignored = SOME_IGNORED},
      false},
     {2, {301, 1733}},
     0,
     false},
    {RAFTER_F32, {{.name = "few", .softcap = 8, .scale = 0.5f, .without_lse = true}, true}, {2, {65, 2001}}, 0, true},
    {RAFTER_F16,
     {{.name = "few", .smoothing = 0.1f, .reduction = RAFTER_NONE, .dloss = true}, false},
     {2, {1100, 131}},
     0,
     false},
    {RAFTER_BF16, {{.name = "few", .ignored = SOME_IGNORED, .dloss = true}, false}, {2, {40, 3003}}, 0, true},
    /* transposed: rows side by side with many options, four to a thread; in parts, and with lse computed again */
    {RAFTER_BF16,
     {{.name = "segments, all",
       .smoothing = 0.1f,
       .z_loss = 0.005f,
       .softcap = 5,
       .class_weight = true,
       .ignored = SOME_IGNORED,
       .dloss = true},
      false},
     {2, {4100, 130}},
     0,
     false},
    {RAFTER_F32, {{.name = "segments", .softcap = 8, .without_lse = true}, true}, {2, {192, 2}}, 0, false},
    {RAFTER_F16,
     {{.name = "segments", .scale = 0.5f, .smoothing = 0.1f, .reduction = RAFTER_NONE, .dloss = true}, false},
     {2, {4099, 7}},
     0,
     false},
    {RAFTER_BF16, {{.name = "segments", .softcap = 12, .denominator = true}, false}, {2, {4099, 33}}, 0, false},
    /* label smoothing weighted by class, of batches of longer rows */
    {RAFTER_BF16,
     {{.name = "batches", .class_weight = true, .smoothing = 0.1f, .reduction = RAFTER_NONE}, false},
     {2, {1030, 1501}},
     0,
     true},
    /* gradients of many short rows of whole packs with options: over the logits, and with lse computed again */
    {RAFTER_BF16,
     {{.name = "short", .smoothing = 0.1f, .reduction = RAFTER_NONE, .ignored = SOME_IGNORED, .dloss = true}, false},
     {2, {8197, 24}},
     0,
     false},
    {RAFTER_F16,
     {{.name = "short, all", .softcap = 5, .z_loss = 0.005f, .smoothing = 0.1f, .class_weight = true, .scale = 0.5f},
      true},
     {2, {8201, 56}},
     0,
     true},
    {RAFTER_F32,
     {{.name = "short", .class_weight = true, .smoothing = 0.1f, .ignored = SOME_IGNORED, .without_lse = true}, true},
     {2, {8195, 16}},
     0,
     true},
    {RAFTER_BF16, {{.name = "short", .softcap = 2, .without_lse = true}, false}, {2, {8195, 40}}, 0, true},
    /* short rows in any layout */
    {RAFTER_F16, {{.name = "scattered", .softcap = 5, .ignored = SOME_IGNORED}, false}, {3, {1801, 5, 12}}, 0, false},
    {RAFTER_F32, {{.name = "scattered", .z_loss = 0.005f, .class_weight = true}, true}, {2, {9001, 16}}, 0, true},
    /* softcap of long rows: most logits beyond it, and one that does not bound exponentials */
    {RAFTER_BF16, {{.name = "long", .softcap = 1.5f, .ignored = SOME_IGNORED}, false}, {2, {1100, 4104}}, 0, true},
    {RAFTER_F16,
     {{.name = "long", .softcap = 3, .smoothing = 0.1f, .without_lse = true}, true},
     {2, {5, 9001}},
     0,
     false},
    {RAFTER_F32, {{.name = "long", .softcap = 70}, false}, {2, {5, 9001}}, 0, false},
};

/* The same, but only logits, dlogits and dloss have the layout: in the transposed one, several slabs of rows side by
 * side, and a dloss that is strided. Most logits beyond a softcap, and few of them. */
static const struct single strided_dloss[] = {
    {RAFTER_F16,
     {{.name = "segments",
       .softcap = 2,
       .class_weight = true,
       .smoothing = 0.1f,
       .reduction = RAFTER_NONE,
       .ignored = SOME_IGNORED,
       .dloss = true},
      false},
     {3, {9, 515, 7}},
     0,
     false},
    {RAFTER_F32,
     {{.name = "segments", .softcap = 12, .reduction = RAFTER_NONE, .dloss = true}, true},
     {3, {5, 512, 6}},
     0,
     false},
};

enum {
    DTYPES = 3,
    SHAPES = sizeof shapes / sizeof *shapes,
    OPTION_SETS = LOSS_CASES + sizeof option_sets / sizeof *option_sets,
    OPTION_SHAPES = sizeof option_shapes / sizeof *option_shapes,
    LONG_ROWS = sizeof long_rows / sizeof *long_rows,
    SINGLES = sizeof singles / sizeof *singles,
    STRIDED_DLOSS = sizeof strided_dloss / sizeof *strided_dloss,
};
static const rafter_dtype dtypes[DTYPES] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};

static struct options option_set(int64_t i) {
    return i < LOSS_CASES ? (struct options){loss_cases[i], false} : option_sets[i - LOSS_CASES];
}

/* ---- one problem ----------------------------------------------------------------------------- */

/*
 * Bounds. Everything before the last rounding is fp32 with unit e = 2^-24, or fp64.
 *
 * Sum: S = sum of e^(u - max) has the relative error
 *     E = e (8 + 3 ln V + min(V, 16384) / 16).
 * A term is accurate to 4 units (v_add_exp). The roundings of (u - max) log2(e), 2 e |u - max|
 * log2(e) each, are weighted by p, and the mean of |u - max| over p is at most ln V. A lane adds at
 * most 1/16 of a chunk (4 lanes x 4 sums, portable), and chunks are merged in fp64. Where u is
 * computed (scale, softcap: tanh to 2 units, 3 roundings), u itself is off by 6 e |u|. So lse,
 * logprob and every r - u_v are off by at most E + 12 e max|u|, before their own rounding.
 *
 * Gradient: p has a relative error of E + e (8 + 3 max|u - max|) + 12 e max|u| (v_scaled_exp), where
 * exponents below -104 give 0, plus 2^-18 where it comes from lse. The terms of a gradient may
 * cancel, so that the same error, times their size, is also allowed as an absolute error.
 */
static void set_bounds(problem *p, const struct loss_case *o, int64_t rows, int64_t classes) {
    const double e = 0x1p-24, huge = p->values != PROBLEM_HUGE                        ? 0
                                     : problem_find(p, "logits")->dtype == RAFTER_F16 ? 6e4
                                                                                      : 1e30;
    const double scale = o->scale != 0 ? o->scale : 1, largest_z = fmax(huge, 11);
    const double largest = scale * (o->softcap != 0 ? fmin(o->softcap, largest_z) : largest_z); /* bound on |u| */
    const double log_classes = log(fmax(2, (double)classes));
    const double sum = e * (8 + 3 * log_classes + fmin((double)classes, 16384) / 16);
    const double computed = o->scale != 0 || o->softcap != 0 ? 12 * e * largest : 0;
    const double statistic = sum + computed;
    const double weight = o->class_weight ? 1.5 : 1, row_weight = o->row_weight ? 4 : 1, lse = largest + log_classes;
    /* sum(w u) consists of fp32 sums of 2048 terms */
    const double smoothing = o->smoothing != 0 ? o->smoothing * weight * largest * e * (4 + 2048 / 16) : 0;
    const double row_loss = row_weight * (weight * statistic + smoothing + 2 * o->z_loss * lse * statistic);

    double upstream = row_weight * (o->dloss ? 4 : 1) * scale, share = 1; /* the factor of a row in the loss */
    if (o->reduction == RAFTER_MEAN && o->denominator)
        share = 1 / LOSS_CASE_DENOMINATOR;
    else if (o->reduction == RAFTER_MEAN) /* at least half the rows count; class weights are at least 0.5 */
        share = (o->class_weight ? 2 : 1) / fmax(1, (double)rows / 2);
    upstream *= share;

    const struct {
        const char *name;
        double relative, absolute;
    } bounds[] = {
        {"lse", e, statistic},
        {"logprob", e, statistic},
        {"row_loss", 2 * e, row_loss},
        {"loss", 2 * e, o->reduction == RAFTER_NONE ? row_loss : (double)rows * share * row_loss},
        {"entropy", e, 2 * (1 + log_classes) * (sum + e * 8) + computed * (2 + log_classes)},
        {"dlogits", 0, 0},
    };
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        problem_tensor *t = problem_find(p, bounds[i].name);
        if (t) {
            t->relative = bounds[i].relative;
            t->absolute = bounds[i].absolute;
        }
    }
    problem_tensor *dlogits = problem_find(p, "dlogits");
    dlogits->relative = sum + e * (8 + 3 * fmin(104, 2 * largest)) + computed + 0x1p-18;
    dlogits->absolute = dlogits->relative * upstream * (weight + 2 * o->z_loss * lse);
}

static void build(problem *p, rafter_dtype dtype, const struct options *o, const struct shape *shape) {
    const int rows_ndim = shape->ndim - 1;
    const int64_t classes = shape->size[rows_ndim];
    problem_tensor *t = problem_add(p, "logits", PROBLEM_INPUT, dtype, shape->ndim, shape->size);
    t->scale = 3;
    t->special = true;
    const int64_t rows = loss_case_declare(p, &o->loss, rows_ndim, shape->size, classes);
    t = problem_add(p, "dlogits", PROBLEM_GRADIENT, dtype, shape->ndim, shape->size);
    t->in_place_of = o->in_place ? "logits" : NULL;
    set_bounds(p, &o->loss, rows, classes);
    loss_case_label(p, o->loss.name, dtype, shape->ndim, shape->size, "");
}

static int64_t count(void) {
    return DTYPES * (SHAPES + OPTION_SETS * OPTION_SHAPES + LONG_ROWS) + SINGLES + STRIDED_DLOSS;
}

static void make(problem *p, int64_t index) {
    const rafter_dtype dtype = dtypes[index % DTYPES];
    int64_t i = index / DTYPES;
    if (i < SHAPES) {
        build(p, dtype, &plain, &shapes[i]);
        return;
    }
    i -= SHAPES;
    if (i < OPTION_SETS * OPTION_SHAPES) {
        const struct options o = option_set(i / OPTION_SHAPES);
        build(p, dtype, &o, &option_shapes[i % OPTION_SHAPES]);
        p->finite_differences = dtype == RAFTER_F32 && i % OPTION_SHAPES == 0;
        return;
    }
    i -= OPTION_SETS * OPTION_SHAPES;
    if (i < LONG_ROWS) {
        int64_t set = 0;
        while (strcmp(option_set(set).loss.name, long_rows[i].options) != 0)
            set++;
        const struct options o = option_set(set);
        build(p, dtype, &o, &long_rows[i].shape);
        return;
    }
    i = index - (count() - SINGLES - STRIDED_DLOSS);
    const struct single *single = i < SINGLES ? &singles[i] : &strided_dloss[i - SINGLES];
    build(p, single->dtype, &single->options, &single->shape);
    for (int t = 0; t < p->tensors && i >= SINGLES; t++)
        p->tensor[t].compact_only |= p->tensor[t].role != PROBLEM_UPSTREAM && !strstr("dlogits", p->tensor[t].name);
    p->large = single->sample > 0;
    p->sample = single->sample;
    p->for_cuda = single->for_cuda;
}

/* The second algorithm: dlogits in the same pass as the loss. */
enum { ONE_PASS = 1 };

static rafter_status call(const problem *p, rafter_context *context, enum problem_mode mode) {
    const rafter_loss_options options = loss_case_options(p);
    rafter_cross_entropy_args args = {.size = sizeof args,
                                      .options = &options,
                                      .logits = problem_dl(p, "logits"),
                                      .target = problem_dl(p, "target"),
                                      .loss = problem_dl(p, "loss"),
                                      .row_loss = problem_dl(p, "row_loss"),
                                      .lse = problem_dl(p, "lse"),
                                      .logprob = problem_dl(p, "logprob"),
                                      .entropy = problem_dl(p, "entropy"),
                                      .argmax = problem_dl(p, "argmax"),
                                      .dloss = problem_dl(p, "dloss"),
                                      .workspace = p->workspace,
                                      .workspace_bytes = p->workspace_bytes};
    const bool one_pass = p->algorithm == ONE_PASS;
    if (mode != PROBLEM_BACKWARD) {
        args.dlogits = mode == PROBLEM_BOTH && one_pass ? problem_dl(p, "dlogits") : NULL;
        if (p->ask)
            return rafter_cross_entropy_workspace(context, &args, RAFTER_FORWARD, p->ask);
        const rafter_status status = rafter_cross_entropy_forward(context, &args);
        if (status != RAFTER_OK || mode == PROBLEM_FORWARD || one_pass)
            return status;
    }
    args.dlogits = problem_dl(p, "dlogits");
    if (p->options.backward_without_lse)
        args.lse = NULL;
    return p->ask ? rafter_cross_entropy_workspace(context, &args, RAFTER_BACKWARD, p->ask)
                  : rafter_cross_entropy_backward(context, &args);
}

/* ---- bench ----------------------------------------------------------------------------------- */

static const int64_t seeds_x[] = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 0};
static const int64_t quick_x[] = {4096, 16384, 65536, 131072, 0};
static const struct bench_table table = {"v", 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD | 1u << PROBLEM_BOTH,
                                         seeds_x, quick_x};

static void make_bench(problem *p, const struct bench_row *row) {
    const int64_t batch = row->quick ? 1024 : 4096, resident = 4096 / (row->dtype == RAFTER_F32 ? 4 : 2);
    const int64_t classes = row->resident && row->x > resident ? resident : row->x;
    build(p, row->dtype, &(struct options){{.name = "bench"}, false}, &(struct shape){2, {batch, classes}});
    p->sample = batch * classes / (1 << 21) + 1;
    snprintf(p->title, sizeof p->title, "batch%lld-%s-ls0.0-mean", (long long)batch, problem_dtype_name(row->dtype));
}

static const char *make_request(problem *p, const struct problem_request *r) {
    enum { MOST = sizeof((struct shape *)0)->size / sizeof(int64_t) };
    if (r->ndim < 1 || r->ndim > MOST)
        return "wanted the shape of the logits, of 1 to 4 dimensions";
    struct shape shape = {.ndim = r->ndim};
    memcpy(shape.size, r->shape, sizeof shape.size);
    build(p, r->dtype, &(struct options){loss_case_request(r), r->in_place}, &shape);
    return NULL;
}

/* ---- the map --------------------------------------------------------------------------------- */

static const struct loss_case map_cases[] = {
    {.name = "plain"},
    {.name = "some ignored", .ignored = SOME_IGNORED},
    {.name = "int32 labels", .narrow = true},
    {.name = "smoothing", .smoothing = 0.1f},
    {.name = "class weights", .class_weight = true},
    {.name = "class weights, smoothing", .class_weight = true, .smoothing = 0.1f},
    {.name = "row weights", .row_weight = true},
    {.name = "z_loss", .z_loss = 1e-4f},
    {.name = "softcap", .softcap = 30},
    {.name = "scale", .scale = 0.5f},
    {.name = "extras", .extras = true},
    {.name = "no lse", .without_lse = true},
    {.name = "all",
     .smoothing = 0.1f,
     .z_loss = 1e-4f,
     .softcap = 30,
     .scale = 0.5f,
     .ignored = SOME_IGNORED,
     .class_weight = true,
     .row_weight = true,
     .extras = true},
};
static const char *const map_options[] = {"plain",         "some ignored",
                                          "int32 labels",  "smoothing",
                                          "class weights", "class weights, smoothing",
                                          "row weights",   "z_loss",
                                          "softcap",       "scale",
                                          "extras",        "no lse",
                                          "all",           NULL};
_Static_assert(sizeof map_options / sizeof *map_options == sizeof map_cases / sizeof *map_cases + 1,
               "a name for every case of the map");

/* The API takes the classes last, so that other dimensions are a matter of strides: PyTorch's
 * [N, V, L] is a transposed [N, L, V] here. A gradient that is not dense is that of a loss per
 * row. */
static void make_map(problem *p, const struct map_cell *cell) {
    static const char *const places[] = {"", ", classes in dim 1 of memory", ", classes in dim 0 of memory"};
    struct options o = {.loss = map_cases[cell->option]};
    struct shape shape = {2, {cell->outer, cell->length}};
    if (cell->dim == MAP_MIDDLE)
        shape = (struct shape){3, {cell->outer, cell->inner, cell->length}};
    else if (cell->dim == MAP_FIRST)
        shape.size[0] = cell->inner;
    if (cell->gradient != PROBLEM_COMPACT) {
        o.loss.reduction = RAFTER_NONE;
        o.loss.dloss = true;
    }
    build(p, cell->dtype, &o, &shape);
    char suffix[80];
    snprintf(suffix, sizeof suffix, "%s%s", o.loss.reduction == RAFTER_NONE ? ", a loss per row" : "",
             places[cell->dim]);
    loss_case_label(p, o.loss.name, cell->dtype, shape.ndim, shape.size, suffix);
    map_lay_out(p, "logits", cell->dim == MAP_LAST ? cell->input : PROBLEM_TRANSPOSED);
    map_lay_out(p, "dlogits", cell->dim == MAP_LAST ? PROBLEM_COMPACT : PROBLEM_TRANSPOSED);
    map_lay_out(p, "dloss", cell->gradient);
}

static const struct map_kind map = {.name = "",
                                    .length_name = "classes",
                                    .length = map_lengths,
                                    .dims = (1u << MAP_DIMS) - 1,
                                    .option = map_options,
                                    .modes = 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD,
                                    .make = make_map};

/* Whether a call in this mode reads or writes the output: backward reads lse alone. */
static bool touches(const problem *p, const problem_tensor *output, enum problem_mode mode) {
    return mode != PROBLEM_BACKWARD || (strcmp(output->name, "lse") == 0 && !p->options.backward_without_lse);
}

static void cost(const problem *p, enum problem_mode mode, double *bytes, double *flops) {
    *bytes = *flops = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (t->role == PROBLEM_INPUT || (t->role == PROBLEM_GRADIENT && mode != PROBLEM_FORWARD) ||
            (t->role == PROBLEM_OUTPUT && touches(p, t, mode)) ||
            (t->role == PROBLEM_UPSTREAM && mode != PROBLEM_FORWARD))
            *bytes += (double)(t->numel * problem_dtype_bytes(t->dtype));
    }
}

static const char *const algorithms[] = {"rafter", "onepass", NULL};

const struct op_cases rafter_cases_cross_entropy = {
    .op = "cross_entropy",
    .prefix = "cross_entropy",
    .algorithms = algorithms,
    .algorithm_modes = {1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD | 1u << PROBLEM_BOTH, 1u << PROBLEM_BOTH},
    .one_call = 1u << ONE_PASS,
    .count = count,
    .make = make,
    .tables = 1,
    .table = &table,
    .make_bench = make_bench,
    .make_request = make_request,
    .maps = 1,
    .map = &map,
    .call = call,
    .cost = cost,
    .oracle = oracle_cross_entropy,
};
