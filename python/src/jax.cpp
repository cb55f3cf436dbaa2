/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One handler for XLA's foreign function interface, which runs any call of the library by name
 * (arguments.h): rafter.jax says which buffer is which argument. On the CPU a handler runs on one of
 * XLA's threads; on CUDA it enqueues on the stream that XLA gives it.
 */
#include <xla/ffi/api/ffi.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "arguments.h"

namespace ffi = xla::ffi;

namespace {

struct Destroy {
    void operator()(rafter_context *context) const {
        rafter_context_destroy(context);
    }
    void operator()(rafter_arguments *arguments) const {
        rafter_arguments_free(arguments);
    }
};
using Arguments = std::unique_ptr<rafter_arguments, Destroy>;

bool to_dtype(ffi::DataType type, DLDataType &dtype) {
    switch (type) {
    case ffi::DataType::F32: dtype = {kDLFloat, 32, 1}; return true;
    case ffi::DataType::F16: dtype = {kDLFloat, 16, 1}; return true;
    case ffi::DataType::BF16: dtype = {kDLBfloat, 16, 1}; return true;
    case ffi::DataType::S32: dtype = {kDLInt, 32, 1}; return true;
    case ffi::DataType::S64: dtype = {kDLInt, 64, 1}; return true;
    default: return false;
    }
}

/* Takes the first word off `words`; an empty one at the end. */
std::string take_word(std::string_view &words) {
    const size_t end = std::min(words.find(' '), words.size());
    const std::string word(words.substr(0, end));
    words.remove_prefix(std::min(end + 1, words.size()));
    return word;
}

/* What a call consists of, besides its buffers. */
struct Names {
    std::string_view call, inputs, outputs; /* names in rafter.h, with spaces between them */
    std::string_view integers, numbers;     /* NAME=VALUE ... */
};

/* Sets NAME=VALUE ...; returns what is wrong, or "". */
template <class Set> std::string set_values(std::string_view words, Set set) {
    while (!words.empty()) {
        const std::string word = take_word(words);
        const size_t equals = word.find('=');
        if (equals == std::string::npos)
            return "'" + word + "' is not NAME=VALUE";
        if (const char *error = set(word.substr(0, equals).c_str(), word.c_str() + equals + 1))
            return error;
    }
    return "";
}

std::string set_buffer(rafter_arguments *arguments, std::string_view &names, const ffi::AnyBuffer &buffer,
                       DLDevice device) {
    const std::string name = take_word(names);
    DLTensor tensor = {};
    tensor.data = buffer.untyped_data();
    tensor.device = device;
    tensor.ndim = static_cast<int32_t>(buffer.dimensions().size());
    tensor.shape = const_cast<int64_t *>(buffer.dimensions().begin()); /* the library only reads it */
    if (!to_dtype(buffer.element_type(), tensor.dtype))
        return name + " has a dtype that Rafter does not take";
    const char *error = rafter_arguments_set_tensor(arguments, name.c_str(), &tensor);
    return error ? error : "";
}

ffi::Error run(rafter_context *context, DLDevice device, const Names &names, const ffi::RemainingArgs &args,
               const ffi::RemainingRets &rets) {
    const Arguments arguments(rafter_arguments_new(std::string(names.call).c_str()));
    rafter_arguments *const a = arguments.get();
    if (!a)
        return ffi::Error::InvalidArgument("rafter.h has no rafter_" + std::string(names.call));
    std::string error = set_values(names.integers, [a](const char *name, const char *value) {
        return rafter_arguments_set_integer(a, name, std::strtoll(value, nullptr, 10));
    });
    if (error.empty())
        error = set_values(names.numbers, [a](const char *name, const char *value) {
            return rafter_arguments_set_number(a, name, std::strtod(value, nullptr));
        });
    std::string_view inputs = names.inputs, outputs = names.outputs;
    for (size_t i = 0; i < args.size() && error.empty(); i++)
        error = set_buffer(a, inputs, args.get<ffi::AnyBuffer>(i).value(), device);
    for (size_t i = 0; i < rets.size() && error.empty(); i++)
        error = set_buffer(a, outputs, *rets.get<ffi::AnyBuffer>(i).value(), device);
    if (error.empty() && rafter_arguments_run(a, context) != RAFTER_OK)
        error = rafter_last_error(context);
    if (error.empty())
        return ffi::Error::Success();
    return ffi::Error::InvalidArgument("rafter_" + std::string(names.call) + ": " + error);
}

ffi::Error run_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view call, std::string_view inputs,
                   std::string_view outputs, std::string_view integers, std::string_view numbers) {
    thread_local const std::unique_ptr<rafter_context, Destroy> context(rafter_arguments_context(kDLCPU, 0));
    if (!context)
        return ffi::Error::Internal(rafter_last_error(nullptr));
    return run(context.get(), {kDLCPU, 0}, {call, inputs, outputs, integers, numbers}, args, rets);
}

/* A context of this thread for a stream. Never destroyed: at exit the CUDA runtime is already gone,
 * and XLA's threads and streams are few. */
rafter_context *cuda_context(int32_t device, void *stream) {
    thread_local std::map<std::pair<int32_t, void *>, rafter_context *> contexts;
    rafter_context *&context = contexts[{device, stream}];
    if (!context) {
        context = rafter_arguments_context(kDLCUDA, device);
        if (context)
            rafter_context_set_stream(context, stream);
    }
    return context;
}

ffi::Error run_cuda(void *stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    std::string_view call, std::string_view inputs, std::string_view outputs, std::string_view integers,
                    std::string_view numbers) {
    rafter_context *const context = cuda_context(device, stream);
    if (!context)
        return ffi::Error::Internal(rafter_last_error(nullptr));
    return run(context, {kDLCUDA, device}, {call, inputs, outputs, integers, numbers}, args, rets);
}

} // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(rafter_xla_cpu, run_cpu,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("call")
                                  .Attr<std::string_view>("inputs")
                                  .Attr<std::string_view>("outputs")
                                  .Attr<std::string_view>("integers")
                                  .Attr<std::string_view>("numbers"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rafter_xla_cuda, run_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("call")
                                  .Attr<std::string_view>("inputs")
                                  .Attr<std::string_view>("outputs")
                                  .Attr<std::string_view>("integers")
                                  .Attr<std::string_view>("numbers"));

#pragma GCC visibility pop
