/* SPDX-License-Identifier: Apache-2.0 */
#include "groups.h"

#include <cinttypes>
#include <cstdio>

#define STRING_OF(name) #name
#define NAME_OF(name) STRING_OF(name)

namespace rafter {

namespace {

/* Calls an op of this package that returns a string, which replaces the arguments on the stack. */
std::string call_for_string(const char *op, StableIValue *stack) {
    check_shim(torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION), op);
    return torch::stable::detail::to<std::string>(stack[0]);
}

StableIValue on_stack(Tensor tensor) {
    return torch::stable::detail::from(tensor.release());
}

StableIValue on_stack(const std::string &text) {
    return torch::stable::detail::from(text);
}

/* The number by which _groups.py means PyTorch's current stream. */
void *const CURRENT_STREAM = reinterpret_cast<void *>(intptr_t(-1));

StableIValue on_stack(const void *stream) {
    return torch::stable::detail::from(static_cast<int64_t>(reinterpret_cast<intptr_t>(stream)));
}

} // namespace

Group::Group(std::string name, int32_t rank, int32_t ranks, Device device) : name_(std::move(name)), device_(device) {
    communicator_.size = sizeof communicator_;
    communicator_.user = this;
    communicator_.rank = rank;
    communicator_.ranks = ranks;
    communicator_.all_gather = all_gather;
    communicator_.all_reduce_sum = all_reduce_sum;
    communicator_.reduce_scatter_sum = reduce_scatter_sum;
    communicator_.describe = describe;
}

/* Memory of the library as a tensor that does not own it. */
Tensor Group::view(const void *data, size_t count, rafter_dtype dtype) const {
    const int64_t size = static_cast<int64_t>(count), stride = 1;
    AtenTensorHandle handle = nullptr;
    check_shim(aoti_torch_create_tensor_from_blob(const_cast<void *>(data), 1, &size, &stride, 0, torch_dtype(dtype),
                                                  device_.type, device_.index, &handle),
               "create_tensor_from_blob");
    return Tensor(handle);
}

/* The functions below are called by C code, which no exception may cross. */

int Group::all_gather(void *user, const void *send, void *receive, size_t bytes, void *stream) {
    Group *const own = static_cast<Group *>(user);
    try {
        const size_t ranks = static_cast<size_t>(own->communicator_.ranks);
        StableIValue stack[] = {on_stack(own->view(send, bytes, RAFTER_U8)),
                                on_stack(own->view(receive, bytes * ranks, RAFTER_U8)), on_stack(own->name_),
                                on_stack(stream)};
        own->error_ = call_for_string(NAME_OF(RAFTER_TORCH_NAMESPACE) "::_group_all_gather", stack);
    } catch (const std::exception &error) {
        own->error_ = error.what();
    }
    return !own->error_.empty();
}

int Group::all_reduce_sum(void *user, float *data, size_t count, void *stream) {
    Group *const own = static_cast<Group *>(user);
    try {
        StableIValue stack[] = {on_stack(own->view(data, count, RAFTER_F32)), on_stack(own->name_), on_stack(stream)};
        own->error_ = call_for_string(NAME_OF(RAFTER_TORCH_NAMESPACE) "::_group_all_reduce", stack);
    } catch (const std::exception &error) {
        own->error_ = error.what();
    }
    return !own->error_.empty();
}

int Group::reduce_scatter_sum(void *user, const float *send, float *receive, size_t count, void *stream) {
    Group *const own = static_cast<Group *>(user);
    try {
        const size_t ranks = static_cast<size_t>(own->communicator_.ranks);
        StableIValue stack[] = {on_stack(own->view(send, count * ranks, RAFTER_F32)),
                                on_stack(own->view(receive, count, RAFTER_F32)), on_stack(own->name_),
                                on_stack(stream)};
        own->error_ = call_for_string(NAME_OF(RAFTER_TORCH_NAMESPACE) "::_group_reduce_scatter", stack);
    } catch (const std::exception &error) {
        own->error_ = error.what();
    }
    return !own->error_.empty();
}

Tensor Group::gathered(const Tensor &share) {
    const DLTensor &from = *share.dl();
    if (from.ndim != 2 || (from.shape[1] > 1 && from.strides[1] != 1) ||
        (from.shape[0] > 1 && from.strides[0] != from.shape[1]))
        throw std::runtime_error("rafter: a share of the input's rows has to be contiguous, [rows, D]");
    const int64_t shape[] = {from.shape[0] * communicator_.ranks, from.shape[1]};
    Tensor all = Tensor::empty(shape, 2, share.dtype(), device_);
    const size_t bytes = static_cast<size_t>(from.shape[0] * from.shape[1] * from.dtype.bits / 8);
    if (all_gather(this, from.data, all.dl()->data, bytes, CURRENT_STREAM))
        throw std::runtime_error("rafter: the input's rows could not be gathered: " + error_);
    return all;
}

const char *Group::describe(void *user, int) {
    return static_cast<Group *>(user)->error_.c_str();
}

Groups::Groups(const std::string &text, Device device, rafter_loss_options &options) {
    const auto parse = [&](const std::string &line, int64_t *first_class, int64_t *count) -> std::unique_ptr<Group> {
        if (line.empty())
            return nullptr;
        int32_t rank = 0, ranks = 0;
        int name = 0;
        if (sscanf(line.c_str(), "%" SCNd32 " %" SCNd32 " %" SCNd64 " %" SCNd64 " %d %n", &rank, &ranks, first_class,
                   count, &share, &name) != 5)
            throw std::runtime_error("rafter: groups is \"" + text +
                                     "\", wanted the text of rafter's Python functions");
        return std::make_unique<Group>(line.substr(static_cast<size_t>(name)), rank, ranks, device);
    };
    const size_t end = text.find(';');
    int64_t unused[2];
    classes = parse(text.substr(0, end), &options.first_class, &options.classes);
    const int share_of_input = share;
    rows = parse(end == std::string::npos ? "" : text.substr(end + 1), &unused[0], &unused[1]);
    share = share_of_input;
    options.class_group = classes ? classes->communicator() : nullptr;
    options.row_group = rows ? rows->communicator() : nullptr;
}

} // namespace rafter
