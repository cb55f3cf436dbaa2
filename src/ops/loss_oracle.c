/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/loss_oracle.h"

#include <math.h>

static int64_t label_of(const struct oracle_loss *o, int64_t row) {
    return (int64_t)problem_value(o->target, row);
}

static double weight_of(const struct oracle_loss *o, int64_t v) {
    return o->class_weight ? problem_value(o->class_weight, v) : 1;
}

struct oracle_loss oracle_loss_begin(const problem *p, int64_t rows, int64_t classes) {
    const rafter_loss_options *options = &p->options.loss;
    struct oracle_loss o = {
        .p = p,
        .rows = rows,
        .classes = classes,
        .ignore_index = options->ignore_index ? *options->ignore_index : -100,
        .smoothing = options->label_smoothing,
        .z_loss = options->z_loss,
        .softcap = options->softcap,
        .scale = options->logit_scale != 0 ? options->logit_scale : 1,
        .target = problem_find(p, "target"),
        .class_weight = problem_find(p, "class_weight"),
        .row_weight = problem_find(p, "row_weight"),
        .dloss = problem_find(p, "dloss"),
        .dentropy = problem_find(p, "dentropy"),
    };
    for (int64_t row = 0; row < rows; row++)
        if (!oracle_loss_ignored(&o, row)) {
            o.counted++;
            o.denominator += weight_of(&o, label_of(&o, row));
        }
    const problem_tensor *denominator = problem_find(p, "denominator");
    if (denominator)
        o.denominator = problem_value(denominator, 0);
    return o;
}

bool oracle_loss_ignored(const struct oracle_loss *o, int64_t row) {
    return label_of(o, row) == o->ignore_index;
}

static double transformed(const struct oracle_loss *o, double z) {
    return o->scale * (o->softcap != 0 ? o->softcap * tanh(z / o->softcap) : z);
}

/* The largest u, skipping NaN, and the sum of e^(u - largest). */
static void statistics(const struct oracle_loss *o, const double *z, double *largest, double *sum) {
    *largest = -INFINITY;
    *sum = 0;
    for (int64_t v = 0; v < o->classes; v++)
        *largest = fmax(*largest, transformed(o, z[v]));
    for (int64_t v = 0; v < o->classes; v++) {
        const double u = transformed(o, z[v]);
        if (u != -INFINITY) /* e^-inf is 0, whatever the largest is */
            *sum += exp(u - *largest);
    }
}

static void expect(const struct oracle_loss *o, const char *name, int64_t row, double value) {
    problem_tensor *t = problem_find(o->p, name);
    if (t)
        problem_expect(t, row, value);
}

double oracle_loss_row(const struct oracle_loss *o, int64_t row, const double *z) {
    double loss = 0, lse = 0, logprob = 0, entropy = 0;
    int64_t argmax = -1;
    if (!oracle_loss_ignored(o, row)) {
        const int64_t y = label_of(o, row);
        const double s = o->smoothing;
        double largest, sum;
        statistics(o, z, &largest, &sum);
        lse = largest + log(sum);
        logprob =
            (transformed(o, z[y]) - largest) - log(sum); /* u_y - r, without losing log(sum) beside a huge largest */
        loss = -(1 - s) * weight_of(o, y) * logprob;
        if (s != 0) {
            double spread = 0;
            for (int64_t v = 0; v < o->classes; v++)
                spread += weight_of(o, v) * ((largest - transformed(o, z[v])) + log(sum));
            loss += s / (double)o->classes * spread;
        }
        if (o->z_loss != 0)
            loss += o->z_loss * lse * lse;
        if (o->row_weight)
            loss *= problem_value(o->row_weight, row);
        for (int64_t v = 0; v < o->classes; v++) {
            const double log_p = (transformed(o, z[v]) - largest) - log(sum), p = exp(log_p);
            if (p != 0)
                entropy -= p * log_p;
            const bool larger = argmax < 0 || z[v] > z[argmax] || (isnan(z[v]) && !isnan(z[argmax]));
            argmax = larger ? v : argmax;
        }
        if (sum == 0)
            entropy = NAN; /* a row of all -inf has no probabilities */
    }
    if (o->p->options.loss.reduction == RAFTER_NONE)
        expect(o, "loss", row, loss);
    expect(o, "row_loss", row, loss);
    expect(o, "lse", row, lse);
    expect(o, "logprob", row, logprob);
    expect(o, "entropy", row, entropy);
    expect(o, "argmax", row, (double)argmax);
    return loss;
}

void oracle_loss_end(const struct oracle_loss *o, const double *row_loss) {
    const rafter_loss_options *options = &o->p->options.loss;
    if (options->reduction == RAFTER_NONE)
        return;
    double loss = 0;
    for (int64_t row = 0; row < o->rows; row++)
        loss += row_loss[row];
    if (options->reduction == RAFTER_MEAN)
        loss = o->counted == 0 && options->zero_if_all_ignored ? 0 : loss / o->denominator;
    expect(o, "loss", 0, loss);
}

void oracle_loss_gradient(const struct oracle_loss *o, int64_t row, const double *z, double *dz) {
    const double s = o->smoothing;
    double largest, sum = 0, total_weight = 0, upstream = 1;
    if (!oracle_loss_ignored(o, row))
        statistics(o, z, &largest, &sum);
    if (sum == 0) { /* ignored, or all -inf */
        for (int64_t v = 0; v < o->classes; v++)
            dz[v] = 0;
        return;
    }
    const int64_t y = label_of(o, row);
    const rafter_reduction reduction = o->p->options.loss.reduction;
    if (o->dloss)
        upstream *= problem_value(o->dloss, reduction == RAFTER_NONE ? row : 0);
    if (o->row_weight)
        upstream *= problem_value(o->row_weight, row);
    if (reduction == RAFTER_MEAN)
        upstream /= o->denominator;
    for (int64_t v = 0; v < o->classes; v++)
        total_weight += weight_of(o, v);
    double entropy = 0;
    for (int64_t v = 0; v < o->classes; v++) {
        const double log_p = (transformed(o, z[v]) - largest) - log(sum), p = exp(log_p);
        entropy -= p != 0 ? p * log_p : 0;
    }
    /* d/du_v of the label term, the smoothing term, z_loss r^2 and the entropy; dr/du_v is p_v. */
    for (int64_t v = 0; v < o->classes; v++) {
        const double log_p = (transformed(o, z[v]) - largest) - log(sum);
        const double p = exp(transformed(o, z[v]) - largest) / sum;
        double du = weight_of(o, y) * (1 - s) * (p - (v == y));
        du += s / (double)o->classes * (total_weight * p - weight_of(o, v));
        du += o->z_loss != 0 ? o->z_loss * 2 * (largest + log(sum)) * p : 0;
        const double cosh_x = o->softcap != 0 ? cosh(z[v] / o->softcap) : 1;
        dz[v] = upstream * du * o->scale / (cosh_x * cosh_x); /* tanh' = 1 / cosh^2 */
        if (o->dentropy && p != 0)
            dz[v] -= problem_value(o->dentropy, row) * p * (log_p + entropy) * o->scale / (cosh_x * cosh_x);
    }
}
