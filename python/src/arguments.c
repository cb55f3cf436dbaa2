/* SPDX-License-Identifier: Apache-2.0 */
#include "arguments.h"

#include <math.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the header's names, with the compiler's offsets and types ---------------------------------- */

enum kind { TENSOR, FLOAT, INT32, INT64, SIZE, ENUM, INT64_POINTER, OPTIONS, MEMORY, OTHER };

/* No default: a field of another type does not compile, and has to be thought about. */
#define KIND(field)                                                                                                    \
    _Generic((field),                                                                                                  \
        const DLTensor *: TENSOR,                                                                                      \
        float: FLOAT,                                                                                                  \
        int32_t: INT32,                                                                                                \
        int64_t: INT64,                                                                                                \
        size_t: SIZE,                                                                                                  \
        unsigned: ENUM,                                                                                                \
        const int64_t *: INT64_POINTER,                                                                                \
        const rafter_loss_options *: OPTIONS,                                                                          \
        void *: MEMORY)

struct field {
    const char *of, *name;
    size_t offset;
    enum kind kind;
};

#define FIELD(of, name) {#of, #name, offsetof(of, name), KIND(((of *)0)->name)},
#define OPAQUE(of, name) {#of, #name, offsetof(of, name), OTHER},
#define CALL(name, args)
#define VALUE(name)
static const struct field fields[] = {
#include "fields.inc"
};
#undef FIELD
#undef OPAQUE
#undef CALL
#undef VALUE

/* A function rafter_<call>, whose argument struct is behind a pointer of one type for all calls. */
struct call {
    const char *name, *args;
    size_t size;
    rafter_status (*run)(rafter_context *context, const void *args);
};

#define FIELD(of, name)
#define OPAQUE(of, name)
#define VALUE(name)
#define CALL(name, args)                                                                                               \
    static rafter_status run_##name(rafter_context *context, const void *given) {                                      \
        const args *const typed = given;                                                                               \
        return rafter_##name(context, typed);                                                                          \
    }
#include "fields.inc"
#undef CALL
#define CALL(name, args) {#name, #args, sizeof(args), run_##name},
static const struct call calls[] = {
#include "fields.inc"
};
#undef CALL
#undef VALUE

static const struct {
    const char *name;
    int64_t value;
} values[] = {
#define CALL(name, args)
#define VALUE(name) {#name, name},
#include "fields.inc"
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { BYTES = 512, TENSORS = 32 }; /* the library refuses larger structs */

struct rafter_arguments {
    const struct call *call;
    alignas(max_align_t) char args[BYTES];
    alignas(max_align_t) char options[BYTES];
    DLTensor tensors[TENSORS];
    int count;
    int64_t integer; /* the only field that is a pointer to an integer points here */
    char error[256];
};

static const struct call *find_call(const char *name) {
    for (size_t i = 0; i < COUNT(calls); i++)
        if (strcmp(calls[i].name, name) == 0)
            return &calls[i];
    return NULL;
}

static const struct field *find_field(const char *of, const char *name) {
    for (size_t i = 0; i < COUNT(fields); i++)
        if (strcmp(fields[i].of, of) == 0 && strcmp(fields[i].name, name) == 0)
            return &fields[i];
    return NULL;
}

static void put_size(char *args, const char *of, size_t size) {
    memcpy(args + find_field(of, "size")->offset, &size, sizeof size);
}

rafter_arguments *rafter_arguments_new(const char *name) {
    const struct call *const call = find_call(name);
    rafter_arguments *const a = call ? calloc(1, sizeof *a) : NULL;
    if (!a)
        return NULL;
    _Static_assert(sizeof(rafter_loss_options) <= BYTES, "rafter_loss_options is larger than the library takes");
    a->call = call;
    put_size(a->args, call->args, call->size);
    put_size(a->options, "rafter_loss_options", sizeof(rafter_loss_options));
    const struct field *const options = find_field(call->args, "options");
    const void *const pointer = a->options;
    if (options)
        memcpy(a->args + options->offset, &pointer, sizeof pointer);
    return a;
}

void rafter_arguments_free(rafter_arguments *a) {
    free(a);
}

/* ---- fields by name ------------------------------------------------------------------------------ */

static const char OPTIONS_PREFIX[] = "options.";

/* Whether callers may set it: not the size, which is set already, nor what must stay zero. */
static bool settable(const struct field *field) {
    return field->kind != OPTIONS && field->kind != MEMORY && field->kind != OTHER &&
           strcmp(field->name, "size") != 0 && strncmp(field->name, "reserved", 8) != 0 &&
           strcmp(field->name, "workspace_bytes") != 0 && strcmp(field->name, "saved_bytes") != 0;
}

/* Returns the field, and in *place its address; NULL, with an error, if no such field can be set. */
static const struct field *locate(rafter_arguments *a, const char *name, char **place) {
    const size_t prefix = sizeof OPTIONS_PREFIX - 1;
    const bool option = find_field(a->call->args, "options") && strncmp(name, OPTIONS_PREFIX, prefix) == 0;
    const char *const of = option ? "rafter_loss_options" : a->call->args;
    const struct field *const field = find_field(of, option ? name + prefix : name);
    if (!field || !settable(field)) {
        snprintf(a->error, sizeof a->error, "rafter_%s has no argument %s", a->call->name, name);
        return NULL;
    }
    *place = (option ? a->options : a->args) + field->offset;
    return field;
}

static const char *wrong_type(rafter_arguments *a, const char *name, const char *given) {
    snprintf(a->error, sizeof a->error, "rafter_%s: %s is not %s", a->call->name, name, given);
    return a->error;
}

const char *rafter_arguments_set_tensor(rafter_arguments *a, const char *name, const DLTensor *tensor) {
    char *place;
    const struct field *const field = locate(a, name, &place);
    if (!field)
        return a->error;
    if (field->kind != TENSOR)
        return wrong_type(a, name, "a tensor");
    if (a->count == TENSORS)
        return wrong_type(a, name, "within the number of tensors of a call");
    DLTensor *const copy = &a->tensors[a->count++];
    *copy = *tensor;
    memcpy(place, &copy, sizeof copy);
    return NULL;
}

const char *rafter_arguments_set_integer(rafter_arguments *a, const char *name, int64_t value) {
    char *place;
    const struct field *const field = locate(a, name, &place);
    if (!field)
        return a->error;
    const int32_t narrow = (int32_t)value;
    const unsigned number = (unsigned)value;
    const size_t size = (size_t)value;
    const int64_t *const pointer = &a->integer;
    bool fits = true;
    switch (field->kind) {
    case INT32:
        fits = narrow == value;
        memcpy(place, &narrow, sizeof narrow);
        break;
    case ENUM:
        fits = value >= 0 && value <= INT32_MAX;
        memcpy(place, &number, sizeof number);
        break;
    case INT64: memcpy(place, &value, sizeof value); break;
    case SIZE:
        fits = value >= 0;
        memcpy(place, &size, sizeof size);
        break;
    case INT64_POINTER:
        a->integer = value;
        memcpy(place, &pointer, sizeof pointer);
        break;
    default: return wrong_type(a, name, "an integer");
    }
    if (fits)
        return NULL;
    snprintf(a->error, sizeof a->error, "%s is %lld, which does not fit", name, (long long)value);
    return a->error;
}

const char *rafter_arguments_set_number(rafter_arguments *a, const char *name, double value) {
    char *place;
    const struct field *const field = locate(a, name, &place);
    if (!field)
        return a->error;
    if (field->kind != FLOAT)
        return wrong_type(a, name, "a number");
    const float number = (float)value;
    /* 0 means the default for some fields: a number that is not 0 must not become it. */
    if ((number == 0.0f && value != 0.0) || (isinf(number) && !isinf(value))) {
        snprintf(a->error, sizeof a->error, "%s is %g, wanted a number that fp32 holds", name, value);
        return a->error;
    }
    memcpy(place, &number, sizeof number);
    return NULL;
}

rafter_status rafter_arguments_run(rafter_arguments *a, rafter_context *context) {
    return a->call->run(context, a->args);
}

/* ---- what else Python needs --------------------------------------------------------------------- */

/* DLPack's second capsule, from version 1.0 on: flags come before the tensor. */
struct versioned {
    uint32_t major, minor;
    void *manager;
    void (*deleter)(struct versioned *self);
    uint64_t flags;
    DLTensor tensor;
};

const char *rafter_arguments_set_capsule(rafter_arguments *a, const char *name, const void *managed, int versioned,
                                         int bfloat16) {
    const struct versioned *const v = managed;
    if (versioned && v->major != 1) {
        snprintf(a->error, sizeof a->error, "%s is a DLPack tensor of version %u, wanted 1", name, (unsigned)v->major);
        return a->error;
    }
    DLTensor tensor = versioned ? v->tensor : *(const DLTensor *)managed;
    if (bfloat16)
        tensor.dtype = (DLDataType){.code = kDLBfloat, .bits = 16, .lanes = 1};
    return rafter_arguments_set_tensor(a, name, &tensor);
}

rafter_context *rafter_arguments_context(int32_t device_type, int32_t device_id) {
    const rafter_context_options options = {
        .size = sizeof options, .device = {.device_type = (DLDeviceType)device_type, .device_id = device_id}};
    rafter_context *context;
    return rafter_context_create(&context, &options) == RAFTER_OK ? context : NULL;
}

int64_t rafter_arguments_value(const char *name) {
    for (size_t i = 0; i < COUNT(values); i++)
        if (strcmp(values[i].name, name) == 0)
            return values[i].value;
    return -1;
}

const char *rafter_arguments_field(const char *name, int index, int *can_be_set) {
    static _Thread_local char text[128];
    const struct call *const call = find_call(name);
    const bool has_options = call && find_field(call->args, "options");
    for (size_t i = 0; i < COUNT(fields); i++) {
        const bool option = has_options && strcmp(fields[i].of, "rafter_loss_options") == 0;
        if (!call || (!option && strcmp(fields[i].of, call->args) != 0) || index-- != 0)
            continue;
        *can_be_set = settable(&fields[i]);
        snprintf(text, sizeof text, "%s%s", option ? OPTIONS_PREFIX : "", fields[i].name);
        return text;
    }
    return NULL;
}
