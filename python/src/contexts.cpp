/* SPDX-License-Identifier: Apache-2.0 */
#include "contexts.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cctype>
#include <deque>
#include <memory>

namespace rafter {

namespace {

[[noreturn]] void fail(const char *op, const std::string &message) {
    throw std::runtime_error(std::string("rafter.") + op + ": " + message);
}

/* The library's message, with the C arguments called by their Python names. */
std::string python_names(const std::string &message) {
    static const struct {
        const char *c, *python;
    } names[] = {{"x", "input"},          {"logits", "input"},        {"weight", "linear_weight"},
                 {"bias", "linear_bias"}, {"class_weight", "weight"}, {"class_group", "group"}};
    const auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
    std::string text;
    for (size_t i = 0, end; i < message.size(); i = end) {
        for (end = i; end < message.size() && in_word(message[end]); end++)
            ;
        if (end == i) {
            text += message[end++];
            continue;
        }
        std::string word = message.substr(i, end - i);
        if (word == "options" && message[end] == '.') { /* options.NAME is NAME */
            end++;
            continue;
        }
        for (const auto &name : names)
            if (word == name.c) {
                word = name.python;
                break;
            }
        text += word;
    }
    return text;
}

/* rafter.batch_invariant, for all threads: backward runs on another one. */
std::atomic<int32_t> batch_invariant{0};

struct Destroy {
    void operator()(rafter_context *context) const {
        rafter_context_destroy(context);
    }
};
using Context = std::unique_ptr<rafter_context, Destroy>;

/* ---- CPU ------------------------------------------------------------------------------------- */

/* rafter_context_options.parallel, on PyTorch's threads. If PyTorch fails, the calling thread does what is left. */
void parallel_on_torch(void *, int32_t count, void (*work)(void *arg, int32_t i), void *arg) {
    struct Work {
        void (*function)(void *, int32_t);
        void *arg;
    } given = {work, arg};
    const auto range = [](int64_t begin, int64_t end, void *context) {
        const Work *const w = static_cast<Work *>(context);
        for (int64_t i = begin; i < end; i++)
            w->function(w->arg, static_cast<int32_t>(i));
    };
    torch_parallel_for(0, count, 1, range, &given);
}

/* The child of a fork has none of PyTorch's threads, and parallel_for would wait for them forever. So
 * contexts in a child use Rafter's own threads, which start again there. */
std::atomic<bool> in_child{false};

void watch_forks() {
    static const int watched = pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    (void)watched;
}

rafter_context *cpu_context(const char *op) {
    thread_local Context context;
    thread_local uint32_t threads = 0;
    thread_local bool of_child = false;
    uint32_t wanted = 1;
    check_shim(torch_get_num_threads(&wanted), "get_num_threads");
    if (!context || threads != wanted || of_child != in_child) {
        watch_forks();
        of_child = in_child;
        rafter_context_options options = {};
        options.size = sizeof options;
        options.threads = static_cast<int32_t>(wanted);
        options.parallel = of_child ? nullptr : parallel_on_torch;
        rafter_context *created = nullptr;
        const rafter_status status = rafter_context_create(&created, &options);
        if (status != RAFTER_OK)
            fail(op, rafter_last_error(nullptr));
        context.reset(created);
        threads = wanted;
    }
    return context.get();
}

/* ---- CUDA ------------------------------------------------------------------------------------ */

/* One context with its scratch memory, which comes from PyTorch's caching allocator: that one knows
 * about streams and graph capture. */
struct PooledContext {
    Device device;
    void *stream = nullptr;
    bool bound = false; /* belongs to `stream`, permanently */
    std::mutex busy;
    Context context;
    AtenTensorHandle scratch = nullptr; /* of the current call */
};

void *allocate_scratch(void *user, size_t bytes) {
    PooledContext *pooled = static_cast<PooledContext *>(user);
    const int64_t size = static_cast<int64_t>(bytes), stride = 1;
    void *memory = nullptr;
    if (aoti_torch_empty_strided(1, &size, &stride, torch_dtype(RAFTER_U8), pooled->device.type, pooled->device.index,
                                 &pooled->scratch) != AOTI_TORCH_SUCCESS)
        return nullptr;
    aoti_torch_get_data_ptr(pooled->scratch, &memory);
    return memory;
}

void release_scratch(void *user, void *, size_t) {
    aoti_torch_delete_tensor_object(static_cast<PooledContext *>(user)->scratch);
}

/* A function of PyTorch's CUDA library, or of the CUDA runtime it is linked with; NULL if PyTorch
 * was built without CUDA. Looked up at run time so that one binary serves both kinds of PyTorch. */
template <class Function> Function *cuda_function(const char *name) {
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function *>(library ? dlsym(library, name) : nullptr);
}

void *current_stream(const char *op, Device device) {
    static auto *const getter = cuda_function<AOTITorchError(int32_t, void **)>("aoti_torch_get_current_cuda_stream");
    void *stream = nullptr;
    if (!getter || getter(device.index, &stream) != AOTI_TORCH_SUCCESS)
        fail(op, "cannot get PyTorch's current CUDA stream");
    return stream;
}

/* Also true when the query fails, as it does on the default stream while another stream is being
 * captured: allocation is forbidden then too. */
bool is_capturing(void *stream) {
    static auto *const getter = cuda_function<int(void *, int *)>("cudaStreamIsCapturing");
    static auto *const clear_error = cuda_function<int()>("cudaGetLastError");
    int status = 0;
    if (!getter || !clear_error)
        return false;
    if (getter(stream, &status) == 0)
        return status != 0;
    clear_error(); /* otherwise PyTorch's next error check would find it */
    return true;
}

/* Creating a context allocates memory, which a stream under capture does not allow; and a graph is
 * usually captured on a stream that has not run anything before. So the pool keeps a few unbound
 * contexts per device, and a stream first seen during a capture takes one of those. Contexts are
 * never freed: streams are few, because PyTorch takes them from a pool. */
class ContextPool {
  public:
    PooledContext &find(const char *op, Device device, void *stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        PooledContext *found = nullptr, *unbound = nullptr;
        int unbound_count = 0;
        for (PooledContext &pooled : contexts_) {
            if (!(pooled.device == device))
                continue;
            if (!pooled.bound)
                unbound = &pooled, unbound_count++;
            else if (pooled.stream == stream)
                found = &pooled;
        }
        if (found && unbound_count == SPARE_CONTEXTS)
            return *found;
        if (!is_capturing(stream)) {
            for (; unbound_count < SPARE_CONTEXTS + (found ? 0 : 1); unbound_count++)
                unbound = &add(op, device, stream);
        }
        if (found)
            return *found;
        if (!unbound)
            fail(op, "the first call on this device is inside a graph capture; make one call before capturing");
        rafter_context_set_stream(unbound->context.get(), stream);
        unbound->stream = stream;
        unbound->bound = true;
        return *unbound;
    }

  private:
    enum { SPARE_CONTEXTS = 3 }; /* unbound contexts per device */

    PooledContext &add(const char *op, Device device, void *stream) {
        PooledContext &pooled = contexts_.emplace_back();
        rafter_context_options options = {};
        options.size = sizeof options;
        options.device = {kDLCUDA, device.index};
        options.stream = stream;
        options.allocate = allocate_scratch;
        options.release = release_scratch;
        options.user = &pooled;
        rafter_context *created = nullptr;
        const rafter_status status = rafter_context_create(&created, &options);
        if (status != RAFTER_OK) {
            contexts_.pop_back();
            fail(op, rafter_last_error(nullptr));
        }
        pooled.device = device;
        pooled.context.reset(created);
        return pooled;
    }

    std::mutex mutex_;
    std::deque<PooledContext> contexts_; /* a deque: the addresses of its elements are kept */
};

ContextPool &context_pool() {
    /* Never destroyed: at exit the CUDA runtime is already gone. */
    static ContextPool *const pool = new ContextPool;
    return *pool;
}

} // namespace

Session::Session(const char *op, Device device) : op_(op) {
    if (device.cuda()) {
        PooledContext &pooled = context_pool().find(op, device, current_stream(op, device));
        lock_ = std::unique_lock<std::mutex>(pooled.busy);
        context_ = pooled.context.get();
    } else {
        context_ = cpu_context(op);
    }
    rafter_context_set_batch_invariant(context_, batch_invariant.load());
}

void Session::operator()(rafter_status status) const {
    if (status == RAFTER_OK)
        return;
    const std::string message = python_names(rafter_last_error(context_));
    /* PyTorch's own ops raise IndexError for these two, and pybind11 translates this exception to it. */
    if (status == RAFTER_LABEL_OUT_OF_RANGE || message.starts_with("dim is "))
        throw std::out_of_range(std::string("rafter.") + op_ + ": " + message);
    fail(op_, message);
}

} // namespace rafter

int32_t rafter_torch_batch_invariant(int32_t mode) {
    return mode < 0 ? rafter::batch_invariant.load() : rafter::batch_invariant.exchange(mode);
}
