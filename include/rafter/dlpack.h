/* SPDX-License-Identifier: Apache-2.0 */
/*
 * DLPack's tensor struct, for builds that do not have <dlpack/dlpack.h>.
 *
 * Origin: the declarations below restate the part of DLPack's C ABI that Rafter's calls take, with
 * DLPack's names and layout (https://github.com/dmlc/dlpack, include/dlpack/dlpack.h, Copyright (c)
 * 2017 by Contributors, Apache License 2.0). Arrays of NumPy, PyTorch, JAX, CuPy or TVM pass
 * without copying.
 *
 * If you also use the official header, include it first, or have it in the include path as
 * <dlpack/dlpack.h>: this file then declares nothing.
 */
#ifndef RAFTER_DLPACK_H
#define RAFTER_DLPACK_H

#if defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#endif

#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 } DLDeviceType;

typedef struct {
    DLDeviceType device_type;
    int32_t device_id;
} DLDevice;

typedef enum {
    kDLInt = 0U,
    kDLUInt = 1U,
    kDLFloat = 2U,
    kDLBfloat = 4U,
    kDLComplex = 5U,
    kDLBool = 6U,
    kDLFloat8_e4m3fn = 10U,
    kDLFloat8_e4m3fnuz = 11U,
    kDLFloat8_e5m2 = 12U,
    kDLFloat8_e5m2fnuz = 13U
} DLDataTypeCode;

typedef struct {
    uint8_t code;   /* a DLDataTypeCode */
    uint8_t bits;   /* 8, 16, 32, 64 */
    uint16_t lanes; /* 1 */
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;       /* ndim sizes */
    int64_t *strides;     /* ndim strides in elements; NULL: row-major and compact */
    uint64_t byte_offset; /* from data to the first element */
} DLTensor;

#ifdef __cplusplus
}
#endif

#endif /* DLPACK_DLPACK_H_ */
#endif /* RAFTER_DLPACK_H */
