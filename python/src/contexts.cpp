/* SPDX-License-Identifier: Apache-2.0 */
#include "contexts.h"

#include <dlfcn.h>

#include <deque>
#include <memory>

namespace rafter {

namespace {

[[noreturn]] void fail(const char *op, const std::string &sentence) {
    throw std::runtime_error(std::string("rafter.") + op + ": " + sentence);
}

struct Destroy {
    void operator()(rafter_context *context) const {
        rafter_context_destroy(context);
    }
};
using Context = std::unique_ptr<rafter_context, Destroy>;

/* ---- CPU ------------------------------------------------------------------------------------- */

rafter_context *cpu_context(const char *op) {
    thread_local Context context;
    thread_local uint32_t threads = 0;
    uint32_t wanted = 1;
    check_shim(torch_get_num_threads(&wanted), "get_num_threads");
    if (!context || threads != wanted) {
        rafter_context_options options = {};
        options.size = sizeof options;
        options.threads = static_cast<int32_t>(wanted);
        rafter_context *made = nullptr;
        const rafter_status status = rafter_context_create(&made, &options);
        if (status != RAFTER_OK)
            fail(op, rafter_last_error(nullptr));
        context.reset(made);
        threads = wanted;
    }
    return context.get();
}

/* ---- CUDA ------------------------------------------------------------------------------------ */

/* A context and what it needs. Scratch memory comes from PyTorch's caching allocator, which knows about streams and
 * graph capture. */
struct Lane {
    Device device;
    void *stream = nullptr;
    bool bound = false; /* to its stream, for good */
    std::mutex busy;
    Context context;
    AtenTensorHandle scratch = nullptr; /* of the call under way */
};

void *lane_allocate(void *user, size_t bytes) {
    Lane *lane = static_cast<Lane *>(user);
    const int64_t size = static_cast<int64_t>(bytes), step = 1;
    void *memory = nullptr;
    if (aoti_torch_empty_strided(1, &size, &step, torch_dtype(RAFTER_U8), lane->device.type, lane->device.index,
                                 &lane->scratch) != AOTI_TORCH_SUCCESS)
        return nullptr;
    aoti_torch_get_data_ptr(lane->scratch, &memory);
    return memory;
}

void lane_release(void *user, void *, size_t) {
    aoti_torch_delete_tensor_object(static_cast<Lane *>(user)->scratch);
}

/* A function of PyTorch's CUDA library or of the CUDA runtime that it is linked with. Where PyTorch was built without
 * CUDA there is none, which is why they are not called by name. */
template <class Function> Function *cuda_function(const char *name) {
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function *>(library ? dlsym(library, name) : nullptr);
}

void *current_stream(const char *op, Device device) {
    static auto *const getter = cuda_function<AOTITorchError(int32_t, void **)>("aoti_torch_get_current_cuda_stream");
    void *stream = nullptr;
    if (!getter || getter(device.index, &stream) != AOTI_TORCH_SUCCESS)
        fail(op, "PyTorch's current CUDA stream is not to be had");
    return stream;
}

/* Also where it cannot be told, as on the default stream while another is being captured: then nothing may be allocated
 * either. */
bool is_capturing(void *stream) {
    static auto *const getter = cuda_function<int(void *, int *)>("cudaStreamIsCapturing");
    static auto *const forget_error = cuda_function<int()>("cudaGetLastError");
    int status = 0;
    if (!getter || !forget_error)
        return false;
    if (getter(stream, &status) == 0)
        return status != 0;
    forget_error(); /* it is not for PyTorch's next check to find */
    return true;
}

/* Making a context allocates, which a stream that is being captured does not allow; and a graph is captured on a stream
 * of its own, that nothing ran on before. So every device has a few contexts to spare, and a stream that is first seen
 * in a capture takes one of those. Lanes are never freed: streams are few, and PyTorch takes them from a pool. */
class Lanes {
  public:
    Lane &find(const char *op, Device device, void *stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Lane *found = nullptr, *spare = nullptr;
        int spares = 0;
        for (Lane &lane : lanes_) {
            if (!(lane.device == device))
                continue;
            if (!lane.bound)
                spare = &lane, spares++;
            else if (lane.stream == stream)
                found = &lane;
        }
        if (found && spares == SPARES)
            return *found;
        if (!is_capturing(stream)) {
            for (; spares < SPARES + (found ? 0 : 1); spares++)
                spare = &add(op, device, stream);
        }
        if (found)
            return *found;
        if (!spare)
            fail(op, "the first call on this device is inside a graph capture; make one before it");
        rafter_context_set_stream(spare->context.get(), stream);
        spare->stream = stream;
        spare->bound = true;
        return *spare;
    }

  private:
    enum { SPARES = 3 };

    Lane &add(const char *op, Device device, void *stream) {
        Lane &lane = lanes_.emplace_back();
        rafter_context_options options = {};
        options.size = sizeof options;
        options.device = {kDLCUDA, device.index};
        options.stream = stream;
        options.allocate = lane_allocate;
        options.release = lane_release;
        options.user = &lane;
        rafter_context *made = nullptr;
        const rafter_status status = rafter_context_create(&made, &options);
        if (status != RAFTER_OK) {
            lanes_.pop_back();
            fail(op, rafter_last_error(nullptr));
        }
        lane.device = device;
        lane.context.reset(made);
        return lane;
    }

    std::mutex mutex_;
    std::deque<Lane> lanes_; /* their addresses stay */
};

Lanes &lanes() {
    static Lanes *const all = new Lanes; /* not destroyed: at exit the CUDA runtime is gone before us */
    return *all;
}

} // namespace

Session::Session(const char *op, Device device) : op_(op) {
    if (device.cuda()) {
        Lane &lane = lanes().find(op, device, current_stream(op, device));
        held_ = std::unique_lock<std::mutex>(lane.busy);
        context_ = lane.context.get();
    } else {
        context_ = cpu_context(op);
    }
}

void Session::operator()(rafter_status status) const {
    if (status != RAFTER_OK)
        fail(op_, rafter_last_error(context_));
}

} // namespace rafter
