/* SPDX-License-Identifier: Apache-2.0 */
#include "json_read.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH = 64 };

static const char *skip_space(const char *at) {
    return at + strspn(at, " \t\r\n");
}

static int hex_digits(const char *at) {
    int value = 0;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef0123456789ABCDEF", *digit = at[i] ? strchr(digits, at[i]) : NULL;
        if (!digit)
            return -1;
        value = 16 * value + (int)(digit - digits) % 16;
    }
    return value;
}

static char *put_utf8(char *to, int code) {
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xc0 | code >> 6);
        *to++ = (char)(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        *to++ = (char)(0xe0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
        *to++ = (char)(0x80 | (code & 0x3f));
    } else {
        *to++ = (char)(0xf0 | code >> 18);
        *to++ = (char)(0x80 | (code >> 12 & 0x3f));
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
        *to++ = (char)(0x80 | (code & 0x3f));
    }
    return to;
}

/* Reads one code point after "\u", from one escape or two. NULL: bad digits. */
static const char *parse_code(const char *at, char **to) {
    int code = hex_digits(at);
    if (code < 0)
        return NULL;
    at += 4;
    if (code >= 0xd800 && code < 0xdc00 && at[0] == '\\' && at[1] == 'u') {
        const int low = hex_digits(at + 2);
        if (low >= 0xdc00 && low < 0xe000) {
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            at += 6;
        }
    }
    *to = put_utf8(*to, code);
    return at;
}

/* Reads a string from its opening quote on into new memory. NULL: not a string. */
static const char *parse_string(const char *at, char **text) {
    if (*at != '"')
        return NULL;
    const char *end = ++at;
    while (*end && *end != '"')
        end += *end == '\\' && end[1] ? 2 : 1;
    if (!*end)
        return NULL;
    char *to = *text = malloc((size_t)(end - at) + 1); /* no escape is shorter than the text it encodes */
    if (!to)
        return NULL;
    while (at && at < end) {
        if (*at != '\\') {
            *to++ = *at++;
            continue;
        }
        at++;
        const char *names = "\"\\/bfnrt", *values = "\"\\/\b\f\n\r\t", *name = strchr(names, *at);
        if (*at == 'u')
            at = parse_code(at + 1, &to);
        else if (name)
            *to++ = values[name - names], at++;
        else
            at = NULL;
    }
    *to = '\0';
    return at ? end + 1 : NULL;
}

static const char *parse_value(const char *at, struct json *value, int depth);

/* Reads the items after an opening bracket. */
static const char *parse_items(const char *at, struct json *parent, char close, int depth) {
    struct json **last = &parent->first;
    at = skip_space(at);
    if (*at == close)
        return at + 1;
    for (;;) {
        struct json *item = *last = calloc(1, sizeof *item);
        if (!item)
            return NULL;
        last = &item->next;
        if (parent->kind == JSON_OBJECT) {
            at = parse_string(skip_space(at), &item->key);
            at = at ? skip_space(at) : NULL;
            if (!at || *at++ != ':')
                return NULL;
        }
        at = parse_value(at, item, depth + 1);
        if (!at)
            return NULL;
        at = skip_space(at);
        if (*at == close)
            return at + 1;
        if (*at++ != ',')
            return NULL;
    }
}

static const char *parse_value(const char *at, struct json *value, int depth) {
    static const struct {
        const char *word;
        enum json_kind kind;
        double number;
    } words[] = {{"null", JSON_NULL, 0}, {"true", JSON_BOOL, 1}, {"false", JSON_BOOL, 0}};
    at = skip_space(at);
    if (depth > DEPTH)
        return NULL;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strncmp(at, words[i].word, strlen(words[i].word)) == 0) {
            value->kind = words[i].kind;
            value->number = words[i].number;
            return at + strlen(words[i].word);
        }
    if (*at == '"') {
        value->kind = JSON_STRING;
        return parse_string(at, &value->text);
    }
    if (*at == '[' || *at == '{') {
        value->kind = *at == '[' ? JSON_ARRAY : JSON_OBJECT;
        return parse_items(at + 1, value, *at == '[' ? ']' : '}', depth);
    }
    const char digit = at[*at == '-']; /* strtod also takes inf, nan and leading spaces */
    if (digit < '0' || digit > '9')
        return NULL;
    char *end;
    value->kind = JSON_NUMBER;
    value->number = strtod(at, &end);
    return end;
}

struct json *json_parse(const char *text) {
    struct json *value = calloc(1, sizeof *value);
    const char *end = value ? parse_value(text, value, 0) : NULL;
    if (end && *skip_space(end) == '\0')
        return value;
    json_free(value);
    return NULL;
}

struct json *json_parse_file(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file)
        return NULL;
    char *text = NULL;
    size_t used = 0, capacity = 0;
    for (bool more = true; more;) {
        if (capacity - used < 65536) {
            capacity = capacity ? 2 * capacity : (size_t)1 << 20;
            char *grown = realloc(text, capacity);
            if (!grown)
                break;
            text = grown;
        }
        const size_t got = fread(text + used, 1, capacity - used - 1, file);
        used += got;
        more = got > 0;
    }
    const bool good = text && !ferror(file);
    fclose(file);
    struct json *value = NULL;
    if (good) {
        text[used] = '\0';
        value = json_parse(text);
        errno = 0;
    }
    free(text);
    return value;
}

void json_free(struct json *value) {
    while (value) {
        struct json *next = value->next;
        json_free(value->first);
        free(value->key);
        free(value->text);
        free(value);
        value = next;
    }
}

const struct json *json_get(const struct json *object, const char *key) {
    const struct json *item = object && object->kind == JSON_OBJECT ? object->first : NULL;
    while (item && strcmp(item->key, key) != 0)
        item = item->next;
    return item;
}

double json_number(const struct json *object, const char *key, double otherwise) {
    const struct json *item = json_get(object, key);
    return item && (item->kind == JSON_NUMBER || item->kind == JSON_BOOL) ? item->number : otherwise;
}

int64_t json_integer(const struct json *object, const char *key, int64_t low, int64_t high) {
    const double number = json_number(object, key, 0), value = isnan(number) ? 0 : number;
    /* INT64_MAX as a double is 2^63, which does not fit: hence the equality */
    return value <= (double)low ? low : value >= (double)high ? high : (int64_t)value;
}

const char *json_text(const struct json *object, const char *key) {
    const struct json *item = json_get(object, key);
    return item && item->kind == JSON_STRING ? item->text : "";
}

int json_count(const struct json *array) {
    int count = 0;
    for (const struct json *item = array ? array->first : NULL; item; item = item->next)
        count++;
    return count;
}
