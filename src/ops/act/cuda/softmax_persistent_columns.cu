/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax over a strided dimension that is too long for one block: panels of columns that are aligned packs.
 * Persistent blocks read every byte once (cuda/persistent_softmax.cuh). */
#include "cuda/persistent_softmax.cuh"
#include "ops/act/cuda/softmax_panel_job.cuh"

namespace {

template <typename T, Kind KIND> struct PersistentSoftmax : Softmax<T, WIDE<T>, true, KIND> {
    typedef typename Softmax<T, WIDE<T>, true, KIND>::Panel Panel;

    DEVICE TileOrigin tile_origin(const Panel &panel) const {
        TileOrigin at = {(int)panel.pack * WIDE<T>, {0, 0, 0}};
        unsigned index = panel.outer;
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (i < this->outer.dims) { /* innermost first */
                const unsigned size = (unsigned)this->outer.size[this->outer.dims - 1 - i];
                at.outer[i] = (int)(index % size);
                index /= size;
            }
        return at;
    }
};

/* The tensor maps of the inputs. False if TMA cannot address them. */
template <class Job> bool map_columns(const SoftmaxViews &views, InputMaps<Job> *maps) {
    const int dim = views.ndim() - 2, column = dim + 1;
    bool mapped = dim <= 3;
    for (int t = 0; mapped && t < Job::INPUTS; t++) {
        const rafter_view &view = views.view[t];
        int64_t size[5] = {view.shape[column], view.shape[dim]}, stride[4] = {view.stride[dim]};
        for (int d = 0; d < dim; d++) {
            size[2 + d] = view.shape[dim - 1 - d];
            stride[1 + d] = view.stride[dim - 1 - d];
        }
        mapped = map_input(maps, t, view, 2 + dim, size, stride);
    }
    return mapped;
}

/* Calls f with the job that runs the panels. */
template <class F> auto with_persistent_job(const OrderedCall &ordered, const PanelTensors &tensors, F f) {
    return for_dtype(ordered.call.out.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        return is_forward(ordered.call) ? f(PersistentSoftmax<T, FORWARDS>{tensors})
               : ordered.expanded       ? f(PersistentSoftmax<T, EXPANDED>{tensors})
                                        : f(PersistentSoftmax<T, BACKWARDS>{tensors});
    });
}

struct PersistentColumnSoftmax {
    typedef act_call Call;
    struct Plan {
        PanelTensors tensors;
        PersistentPlan plan;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        if (ordered.dim_is_contiguous())
            return "dim is contiguous";
        const SlabViews slabs(ordered.call);
        if (is_narrow(call, slabs))
            return "columns are few and narrow";
        if (is_long(call, slabs))
            return "columns are so long that blocks would wait for each other";
        const SoftmaxViews views(ordered.call, ordered.expanded);
        const ColumnPanels columns(ordered.call, views);
        if (!columns.wide)
            return "columns are not aligned packs of 16 bytes";
        return with_persistent_job(ordered, columns.tensors, [&](const auto &job) {
            typedef std::decay_t<decltype(job)> Job;
            InputMaps<Job> maps;
            const char *const reason =
                persistent_why_not<Job>(device, columns.panels, columns.rows, columns.tensors.across);
            return reason || map_columns(views, &maps) ? reason : "TMA cannot address the layout";
        });
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SoftmaxViews views(ordered.call, ordered.expanded);
        const ColumnPanels columns(ordered.call, views);
        plan->tensors = columns.tensors;
        return with_persistent_job(ordered, columns.tensors, [&](const auto &job) {
            typedef std::decay_t<decltype(job)> Job;
            plan->plan = plan_persistent<Job>(device, columns.panels, columns.rows);
            return persistent_bytes<Job>(plan->plan);
        });
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        const SoftmaxViews views(ordered.call, ordered.expanded);
        return with_persistent_job(ordered, plan.tensors, [&](const auto &job) {
            InputMaps<std::decay_t<decltype(job)>> maps;
            if (!map_columns(views, &maps))
                return rafter_fail(context, RAFTER_DEVICE_ERROR, "act: TMA cannot address the layout");
            launch_persistent(context, maps, job, plan.plan, workspace);
            return RAFTER_OK;
        });
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_persistent_columns, PersistentColumnSoftmax)
