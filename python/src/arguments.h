/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of the library with arguments by name, for callers that cannot include its header: ctypes
 * (python/rafter/array.py) and the handlers of XLA (jax.cpp). The layout of the argument structs is
 * the compiler's; a name or a type that the header does not have is an error.
 *
 *     rafter_arguments *a = rafter_arguments_new("cross_entropy_forward");
 *     const char *error = rafter_arguments_set_tensor(a, "logits", &logits);   // NULL: no error
 *     error = rafter_arguments_set_number(a, "options.z_loss", 1e-4);
 *     ...
 *     rafter_status status = rafter_arguments_run(a, context);
 *     rafter_arguments_free(a);
 */
#ifndef RAFTER_PYTHON_ARGUMENTS_H
#define RAFTER_PYTHON_ARGUMENTS_H

#include <rafter/rafter.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rafter_arguments rafter_arguments;

/* For rafter_<call>, with all arguments at their defaults. NULL: there is no such call, or no
 * memory. */
RAFTER_API rafter_arguments *rafter_arguments_new(const char *call);
RAFTER_API void rafter_arguments_free(rafter_arguments *arguments);

/* Each sets one field: of the argument struct, or, called options.NAME, of its rafter_loss_options.
 * They return NULL, or why not; the text is valid until the next call. The tensor is copied; its
 * data, shape and strides must live until rafter_arguments_run returns. An integer also sets an
 * enum. */
RAFTER_API const char *rafter_arguments_set_tensor(rafter_arguments *arguments, const char *name,
                                                   const DLTensor *tensor);
RAFTER_API const char *rafter_arguments_set_integer(rafter_arguments *arguments, const char *name, int64_t value);
RAFTER_API const char *rafter_arguments_set_number(rafter_arguments *arguments, const char *name, double value);

RAFTER_API rafter_status rafter_arguments_run(rafter_arguments *arguments, rafter_context *context);

/* A tensor of a DLPack capsule: of a DLManagedTensor, or, versioned, of a DLManagedTensorVersioned.
 * bfloat16: the tensor holds bf16, whatever its dtype says; for libraries that export it as
 * integers. */
RAFTER_API const char *rafter_arguments_set_capsule(rafter_arguments *arguments, const char *name, const void *managed,
                                                    int versioned, int bfloat16);

/* A context for a DLPack device, on CUDA with the legacy default stream. NULL: see
 * rafter_last_error(NULL). */
RAFTER_API rafter_context *rafter_arguments_context(int32_t device_type, int32_t device_id);

/* The value of an enum's name; -1: the header has no such name. */
RAFTER_API int64_t rafter_arguments_value(const char *name);

/* Field number `index` of rafter_<call>'s argument struct, those of rafter_loss_options as
 * options.NAME: its name, or NULL past the end. *settable: whether one of the functions above sets
 * it. */
RAFTER_API const char *rafter_arguments_field(const char *call, int index, int *settable);

#ifdef __cplusplus
}
#endif

#endif
