/* SPDX-License-Identifier: Apache-2.0 */
/* Calls whose results are known, to be made beside others. */
#include "parts.h"

/* The op's largest problem that is not `large`, has an oracle for every element, and overwrites
 * none of its inputs. */
static bool largest_problem(const struct op_cases *op, problem *largest) {
    double most = 0;
    for (int64_t index = 0; index < op->count(); index++) {
        problem p = {.op = op};
        op->make(&p, index);
        double elements = 0;
        bool in_place = false;
        for (int i = 0; i < p.tensors; i++) {
            elements += (double)p.tensor[i].numel;
            in_place |= p.tensor[i].in_place_of != NULL || p.tensor[i].accumulates;
        }
        if (!p.large && p.sample <= 1 && !in_place && elements > most) {
            most = elements;
            *largest = p;
        }
    }
    return most > 0;
}

bool join(struct party *party, const struct op_cases *op, enum problem_mode mode) {
    party->mode = mode;
    if (!largest_problem(op, &party->p) || !problem_allocate(&party->p, 3))
        return false;
    problem_prepare_backward(&party->p);
    party->context = open_context();
    problem_poison(&party->p, mode);
    if (problem_call(&party->p, party->context, mode) != RAFTER_OK) /* alone */
        return false;
    party->bits = problem_digest(&party->p, mode);
    problem_poison(&party->p, mode);
    return true;
}

void leave(struct party *party) {
    if (!party->context)
        return;
    problem_leave_device(&party->p);
    close_context(party->context);
    problem_free(&party->p);
}

void open_line(struct line *line, rafter_act_kind kind, void *stream) {
    *line = (struct line){.shape = {LINE}, .context = open_on(stream)};
    line->gpu_x = gpu_allocate(sizeof(uint16_t) * LINE);
    line->gpu_y = gpu_allocate(sizeof(uint16_t) * LINE);
    line->x = rafter_tensor(line->gpu_x, RAFTER_BF16, 1, line->shape);
    line->y = rafter_tensor(line->gpu_y, RAFTER_BF16, 1, line->shape);
    line->x.device = line->y.device = context_device(line->context);
    line->args = (rafter_act_args){.size = sizeof line->args, .kind = kind, .x = &line->x, .y = &line->y};
    gpu_fill(line->context, line->gpu_x, 0, sizeof(uint16_t) * LINE);
    gpu_fill(line->context, line->gpu_y, 0xff, sizeof(uint16_t) * LINE);
    gpu_synchronize(line->context);
}

void close_line(struct line *line) {
    gpu_release(line->gpu_x);
    gpu_release(line->gpu_y);
    close_context(line->context);
}
