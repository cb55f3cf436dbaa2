/* SPDX-License-Identifier: Apache-2.0 */
/* A JSON reader for the worker's answers and for reports of earlier runs. */
#ifndef RAFTER_BENCH_JSON_READ_H
#define RAFTER_BENCH_JSON_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum json_kind { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json {
    enum json_kind kind;
    char *key;     /* of a member of an object, else NULL */
    double number; /* 0 or 1 for booleans */
    char *text;
    struct json *first, *next; /* items of an array or object; the value after this one */
};

/* NULL: not JSON, or no memory. */
struct json *json_parse(const char *text);
struct json *json_parse_file(const char *path); /* errno is 0 if the file was read but is not JSON */
void json_free(struct json *value);

/* All of these accept NULL, or a value of another kind, and then return NULL, "" or `otherwise`. */
const struct json *json_get(const struct json *object, const char *key);
double json_number(const struct json *object, const char *key, double otherwise);
/* The number, cut to an integer and clamped to [low, high]. Without a number, or with NaN: 0, clamped likewise. */
int64_t json_integer(const struct json *object, const char *key, int64_t low, int64_t high);
const char *json_text(const struct json *object, const char *key);
int json_count(const struct json *array);

#endif
