/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PyTorch tensors as DLTensors, and the boxed calling convention of the LibTorch stable ABI. Everything goes through
 * the C shim (aoti_torch_*, torch_*), so one binary serves PyTorch 2.10 and later. torch::stable::Tensor would do too;
 * it costs a shared_ptr per argument and a trip through the dispatcher per output, which is what a small call is made
 * of.
 */
#ifndef RAFTER_PYTHON_TENSOR_H
#define RAFTER_PYTHON_TENSOR_H

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "rafter/rafter.h"

namespace rafter {

/* Throws what PyTorch turns into a RuntimeError. */
inline void check_shim(AOTITorchError error, const char *what) {
    if (error != AOTI_TORCH_SUCCESS)
        throw std::runtime_error(std::string("rafter: PyTorch failed in ") + what);
}

struct Device {
    int32_t type, index; /* as the shim counts them */
    bool cuda() const {
        return type == aoti_torch_device_type_cuda();
    }
    bool operator==(const Device &) const = default;
    std::string name() const {
        return cuda()                                 ? "cuda:" + std::to_string(index)
               : type == aoti_torch_device_type_cpu() ? "the CPU"
                                                      : "another device";
    }
};

/* PyTorch's number of each of Rafter's dtypes, in the order of rafter_dtype. */
inline int32_t torch_dtype(rafter_dtype dtype) {
    static const int32_t numbers[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                      aoti_torch_dtype_float16(), aoti_torch_dtype_int32(),
                                      aoti_torch_dtype_int64(),   aoti_torch_dtype_uint8()};
    return numbers[dtype];
}

/* For any other dtype: one that no op takes, so that the library refuses it by name. */
inline DLDataType dl_dtype(int32_t number) {
    if (number == torch_dtype(RAFTER_F32))
        return {kDLFloat, 32, 1};
    if (number == torch_dtype(RAFTER_BF16))
        return {kDLBfloat, 16, 1};
    if (number == torch_dtype(RAFTER_F16))
        return {kDLFloat, 16, 1};
    if (number == torch_dtype(RAFTER_I64))
        return {kDLInt, 64, 1};
    if (number == torch_dtype(RAFTER_I32))
        return {kDLInt, 32, 1};
    if (number == aoti_torch_dtype_float64())
        return {kDLFloat, 64, 1};
    return {0xff, static_cast<uint8_t>(8 * aoti_torch_dtype_element_size(number)), 1};
}

/* Owns a tensor, or nothing. */
class Tensor {
  public:
    enum { MOST_DIMS = 64 }; /* as many as PyTorch has */

    Tensor() = default;
    explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
        int64_t dims = 0;
        check_shim(aoti_torch_get_dim(handle, &dims), "get_dim");
        check_shim(aoti_torch_get_sizes(handle, &dl_.shape), "get_sizes");
        check_shim(aoti_torch_get_strides(handle, &dl_.strides), "get_strides");
        check_shim(aoti_torch_get_data_ptr(handle, &dl_.data), "get_data_ptr");
        check_shim(aoti_torch_get_dtype(handle, &dtype_), "get_dtype");
        check_shim(aoti_torch_get_device_type(handle, &device_.type), "get_device_type");
        check_shim(aoti_torch_get_device_index(handle, &device_.index), "get_device_index");
        dl_.ndim = static_cast<int32_t>(dims);
        dl_.dtype = dl_dtype(dtype_);
        dl_.device = device_.cuda() ? DLDevice{kDLCUDA, device_.index} : DLDevice{kDLCPU, 0};
    }
    Tensor(Tensor &&other) noexcept
        : handle_(std::exchange(other.handle_, nullptr)), dl_(other.dl_), dtype_(other.dtype_), device_(other.device_),
          wanted_(other.wanted_) {
    }
    Tensor &operator=(Tensor &&other) noexcept {
        std::swap(handle_, other.handle_);
        dl_ = other.dl_, dtype_ = other.dtype_, device_ = other.device_, wanted_ = other.wanted_;
        return *this;
    }
    ~Tensor() {
        if (handle_)
            aoti_torch_delete_tensor_object(handle_);
    }

    /* A compact new tensor. One that is not wanted has no elements, and its dl() is NULL: an op's schema has a fixed
     * number of results. */
    static Tensor empty(const int64_t *shape, int dims, int32_t dtype, Device device, bool wanted = true) {
        int64_t strides[MOST_DIMS], none = 0;
        if (!wanted)
            shape = &none, dims = 1;
        int64_t step = 1;
        for (int d = dims - 1; d >= 0; d--) {
            strides[d] = step;
            step *= shape[d] > 1 ? shape[d] : 1;
        }
        AtenTensorHandle handle = nullptr;
        check_shim(aoti_torch_empty_strided(dims, shape, strides, dtype, device.type, device.index, &handle), "empty");
        Tensor made(handle);
        made.wanted_ = wanted;
        return made;
    }

    /* A new tensor of this one's shape, laid out as torch.empty_like lays it out. */
    Tensor empty_like(bool wanted = true) const {
        if (!wanted || compact())
            return empty(dl_.shape, dl_.ndim, dtype_, device_, wanted);
        StableIValue stack[6] = {torch::stable::detail::from(share())}; /* and five options: None */
        check_shim(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION), "empty_like");
        return Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
    }

    bool has() const {
        return handle_ != nullptr;
    }
    const DLTensor *dl() const {
        return handle_ && wanted_ ? &dl_ : nullptr;
    }
    int dims() const {
        return dl_.ndim;
    }
    const int64_t *shape() const {
        return dl_.shape;
    }
    int32_t dtype() const {
        return dtype_;
    }
    Device device() const {
        return device_;
    }
    AtenTensorHandle release() {
        return std::exchange(handle_, nullptr);
    }

  private:
    bool compact() const {
        int64_t step = 1;
        for (int d = dl_.ndim - 1; d >= 0; d--) {
            if (dl_.shape[d] != 1 && dl_.strides[d] != step)
                return false;
            step *= dl_.shape[d];
        }
        return true;
    }
    AtenTensorHandle share() const {
        AtenTensorHandle copy = nullptr;
        check_shim(aoti_torch_new_tensor_handle(handle_, &copy), "new_tensor_handle");
        return copy;
    }

    AtenTensorHandle handle_ = nullptr;
    DLTensor dl_ = {};
    int32_t dtype_ = 0;
    Device device_ = {};
    bool wanted_ = true;
};

/* One boxed call: takes the arguments in the order of the schema, all of them, then puts the results in their place. */
class Call {
  public:
    explicit Call(StableIValue *stack) : stack_(stack) {
    }

    Tensor tensor() {
        return same_device(Tensor(take<AtenTensorHandle>()));
    }
    Tensor optional_tensor() {
        const auto given = take<std::optional<AtenTensorHandle>>();
        return given ? same_device(Tensor(*given)) : Tensor();
    }
    int64_t integer() {
        return take<int64_t>();
    }
    float number() {
        return static_cast<float>(take<double>());
    }
    bool flag() {
        return take<bool>();
    }

    /* Where the first tensor is. Throws if another one is elsewhere; not earlier, so that all arguments are owned. */
    Device device() const {
        if (!stray_.empty())
            throw std::runtime_error(stray_);
        return device_;
    }

    template <class... Results> void give(Results &&...results) {
        int at = 0;
        ((stack_[at++] = torch::stable::detail::from(results.release())), ...);
    }

  private:
    template <class T> T take() {
        return torch::stable::detail::to<T>(stack_[taken_++]);
    }
    Tensor same_device(Tensor tensor) {
        if (!placed_)
            device_ = tensor.device(), placed_ = true;
        else if (!(tensor.device() == device_))
            stray_ = "rafter: argument " + std::to_string(taken_) + " is on " + tensor.device().name() +
                     ", wanted the first tensor's device, " + device_.name();
        return tensor;
    }

    StableIValue *stack_;
    int taken_ = 0;
    bool placed_ = false;
    Device device_ = {};
    std::string stray_;
};

} // namespace rafter

#endif
