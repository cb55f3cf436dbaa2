/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many rows of 2 to 32 classes that follow each other (cuda/tiny_rows.cuh), with any options but row weights, and
 * without the outputs logprob, entropy and argmax: a thread takes a row. Forward: one kernel. Backward: a kernel that
 * writes the factor of all gradients, then one that writes the gradients.
 */
#include "ops/cross_entropy/cuda/basic_factor.cuh"
#include "ops/cross_entropy/cuda/tiny_ops.cuh"

namespace {

constexpr int PER_SM = 4;          /* blocks */
constexpr int ROWS_AT_ONCE = 4;    /* of a thread, at most */
constexpr int ROWS_OF_OPTIONS = 2; /* the same in calls with many options */
/* Blocks per multiprocessor for gradients of such calls, which need more registers. */
constexpr int options_per_sm(int count) {
    return count > 16 ? 3 : 4;
}

/* Kernel arguments. */
struct TinyArgs : OptionArgs {
    TinyRows tiny;
};

/* Many options: see has_many_options. */
template <typename T, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void options_losses(const __grid_constant__ TinyArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    OptionsLoss<T> op(a);
    tiny_rows<OptionsLoss<T>, T, COUNT, ROWS, false>(op, a.tiny, dynamic);
    if (a.basic.loss)
        add_up_threads<TINY_THREADS>(a.basic, op.sum);
}

template <typename T, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS,
                             options_per_sm(COUNT)) void options_gradients(const __grid_constant__ TinyArgs a) {
    DYNAMIC_SHARED(uint4, dynamic);
    OptionsGradient<T, false> op(a);
    tiny_rows<OptionsGradient<T, false>, T, COUNT, ROWS, true>(op, a.tiny, dynamic);
}

/* No options, or one. OPTIONS: label smoothing or class weights. */
template <typename T, bool OPTIONS, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void tiny_losses(const __grid_constant__ TinyArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    TinyLoss<T, OPTIONS> op(a);
    tiny_rows<TinyLoss<T, OPTIONS>, T, COUNT, ROWS, false>(op, a.tiny, dynamic);
    if (a.basic.loss)
        add_up_threads<TINY_THREADS>(a.basic, op.sum);
}

template <typename T, bool OPTIONS, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void tiny_gradients(const __grid_constant__ TinyArgs a) {
    DYNAMIC_SHARED(uint4, dynamic);
    TinyGradient<T, OPTIONS> op = {a};
    tiny_rows<TinyGradient<T, OPTIONS>, T, COUNT, ROWS, true>(op, a.tiny, dynamic);
}

struct BasicTinyRows {
    typedef cross_entropy_call Call;
    struct Plan {
        TinyArgs args;
        BasicWorkspace workspace;
        int64_t blocks;
        bool forward, many; /* many: has_many_options */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_options(p, call))
            return reason;
        return why_not_tiny(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient ? 2 : 1,
                            static_cast<int>(rafter_dtype_bytes(call.logits.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        TinyRows &tiny = plan->args.tiny;
        static_cast<OptionArgs &>(plan->args) = option_args(device, p, call);
        plan->many = has_many_options(call.loss);
        tiny = tiny_rows_of(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient ? 2 : 1,
                            static_cast<int>(rafter_dtype_bytes(call.logits.dtype)),
                            plan->many ? ROWS_OF_OPTIONS : ROWS_AT_ONCE);
        plan->forward = p.forward;
        plan->blocks =
            tiny_blocks(tiny, device, plan->many && !p.forward ? options_per_sm(tiny_count(tiny.length)) : PER_SM);
        return plan->workspace.place(p.forward ? plan->blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        TinyArgs args = plan.args;
        args.factor = plan.workspace.start(context, !plan.forward, &args.basic, workspace);
        const Launch how = {plan.blocks, TINY_THREADS, tiny_shared(args.tiny)};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.many)
                return for_tiny_shape<T, ROWS_OF_OPTIONS>(args.tiny, [&](auto count, auto rows) {
                    constexpr int COUNT = decltype(count)::value, ROWS = decltype(rows)::value;
                    if (plan.forward)
                        ::launch(context, how, options_losses<T, COUNT, ROWS>, args);
                    else
                        ::launch(context, how, options_gradients<T, COUNT, ROWS>, args);
                });
            for_tiny_shape<T, ROWS_AT_ONCE>(args.tiny, [&](auto count, auto rows) {
                constexpr int COUNT = decltype(count)::value, ROWS = decltype(rows)::value;
                for_bool(args.basic.smooths || args.basic.weighs, [&](auto options) {
                    constexpr bool OPTIONS = decltype(options)::value;
                    if (plan.forward)
                        ::launch(context, how, tiny_losses<T, OPTIONS, COUNT, ROWS>, args);
                    else
                        ::launch(context, how, tiny_gradients<T, OPTIONS, COUNT, ROWS>, args);
                });
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_tiny_rows, BasicTinyRows)
