/* SPDX-License-Identifier: Apache-2.0 */
/* The part of oneDNN's C API that differs between versions 2 and 3, as one set of functions. In
 * version 2 a descriptor is a struct and a primitive is described in two steps; in version 3 it is
 * a handle, and one step. */
#ifndef RAFTER_BENCH_ONEDNN_API_H
#define RAFTER_BENCH_ONEDNN_API_H

#include <oneapi/dnnl/dnnl.h>

#if DNNL_VERSION_MAJOR >= 3

typedef dnnl_memory_desc_t onednn_layout;
#define ONEDNN_LAYOUT(layout) (layout)

static inline dnnl_status_t onednn_layout_create(onednn_layout *layout, int ndim, const dnnl_dims_t shape,
                                                 dnnl_data_type_t dtype, const dnnl_dims_t stride) {
    return dnnl_memory_desc_create_with_strides(layout, ndim, shape, dtype, stride);
}

static inline dnnl_status_t onednn_scale(dnnl_post_ops_t ops, float factor) {
    return dnnl_post_ops_append_eltwise(ops, dnnl_eltwise_linear, factor, 0);
}

static inline dnnl_status_t onednn_eltwise(dnnl_primitive_desc_t *plan, dnnl_engine_t engine, dnnl_alg_kind_t kind,
                                           float alpha, onednn_layout layout) {
    return dnnl_eltwise_forward_primitive_desc_create(plan, engine, dnnl_forward_training, kind, layout, layout, alpha,
                                                      0, NULL);
}

static inline dnnl_status_t onednn_eltwise_backward(dnnl_primitive_desc_t *plan, dnnl_engine_t engine,
                                                    dnnl_alg_kind_t kind, float alpha, onednn_layout layout,
                                                    dnnl_primitive_desc_t forward) {
    return dnnl_eltwise_backward_primitive_desc_create(plan, engine, kind, layout, layout, layout, alpha, 0, forward,
                                                       NULL);
}

static inline dnnl_status_t onednn_softmax(dnnl_primitive_desc_t *plan, dnnl_engine_t engine, onednn_layout layout,
                                           int axis) {
    return dnnl_softmax_forward_primitive_desc_create(plan, engine, dnnl_forward_training, dnnl_softmax_accurate,
                                                      layout, layout, axis, NULL);
}

static inline dnnl_status_t onednn_softmax_backward(dnnl_primitive_desc_t *plan, dnnl_engine_t engine,
                                                    onednn_layout layout, int axis, dnnl_primitive_desc_t forward) {
    return dnnl_softmax_backward_primitive_desc_create(plan, engine, dnnl_softmax_accurate, layout, layout, layout,
                                                       axis, forward, NULL);
}

static inline dnnl_status_t onednn_matmul(dnnl_primitive_desc_t *plan, dnnl_engine_t engine, onednn_layout a,
                                          onednn_layout b, onednn_layout c, dnnl_primitive_attr_t attributes) {
    return dnnl_matmul_primitive_desc_create(plan, engine, a, b, NULL, c, attributes);
}

#else

typedef dnnl_memory_desc_t onednn_layout;
#define ONEDNN_LAYOUT(layout) (&(layout))

static inline dnnl_status_t onednn_layout_create(onednn_layout *layout, int ndim, const dnnl_dims_t shape,
                                                 dnnl_data_type_t dtype, const dnnl_dims_t stride) {
    return dnnl_memory_desc_init_by_strides(layout, ndim, shape, dtype, stride);
}

static inline dnnl_status_t onednn_scale(dnnl_post_ops_t ops, float factor) {
    return dnnl_post_ops_append_eltwise(ops, 1, dnnl_eltwise_linear, factor, 0);
}

static inline dnnl_status_t onednn_eltwise(dnnl_primitive_desc_t *plan, dnnl_engine_t engine, dnnl_alg_kind_t kind,
                                           float alpha, onednn_layout layout) {
    dnnl_eltwise_desc_t op;
    const dnnl_status_t status = dnnl_eltwise_forward_desc_init(&op, dnnl_forward_training, kind, &layout, alpha, 0);
    return status == dnnl_success ? dnnl_primitive_desc_create(plan, &op, NULL, engine, NULL) : status;
}

static inline dnnl_status_t onednn_eltwise_backward(dnnl_primitive_desc_t *plan, dnnl_engine_t engine,
                                                    dnnl_alg_kind_t kind, float alpha, onednn_layout layout,
                                                    dnnl_primitive_desc_t forward) {
    dnnl_eltwise_desc_t op;
    const dnnl_status_t status = dnnl_eltwise_backward_desc_init(&op, kind, &layout, &layout, alpha, 0);
    return status == dnnl_success ? dnnl_primitive_desc_create(plan, &op, NULL, engine, forward) : status;
}

static inline dnnl_status_t onednn_softmax(dnnl_primitive_desc_t *plan, dnnl_engine_t engine, onednn_layout layout,
                                           int axis) {
    dnnl_softmax_desc_t op;
    const dnnl_status_t status = dnnl_softmax_forward_desc_init(&op, dnnl_forward_training, &layout, axis);
    return status == dnnl_success ? dnnl_primitive_desc_create(plan, &op, NULL, engine, NULL) : status;
}

static inline dnnl_status_t onednn_softmax_backward(dnnl_primitive_desc_t *plan, dnnl_engine_t engine,
                                                    onednn_layout layout, int axis, dnnl_primitive_desc_t forward) {
    dnnl_softmax_desc_t op;
    const dnnl_status_t status = dnnl_softmax_backward_desc_init(&op, &layout, &layout, axis);
    return status == dnnl_success ? dnnl_primitive_desc_create(plan, &op, NULL, engine, forward) : status;
}

static inline dnnl_status_t onednn_matmul(dnnl_primitive_desc_t *plan, dnnl_engine_t engine, onednn_layout a,
                                          onednn_layout b, onednn_layout c, dnnl_primitive_attr_t attributes) {
    dnnl_matmul_desc_t op;
    const dnnl_status_t status = dnnl_matmul_desc_init(&op, &a, &b, NULL, &c);
    return status == dnnl_success ? dnnl_primitive_desc_create(plan, &op, attributes, engine, NULL) : status;
}

#endif
#endif
