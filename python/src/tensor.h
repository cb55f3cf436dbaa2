/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PyTorch tensors as DLTensors, and the boxed calling convention of the LibTorch stable ABI.
 * Everything goes through the C shim (aoti_torch_*, torch_*), so one binary serves PyTorch 2.10 and
 * later. torch::stable::Tensor would work too, but costs a shared_ptr per argument and a dispatcher
 * call per output; in a small call these dominate.
 */
#ifndef RAFTER_PYTHON_TENSOR_H
#define RAFTER_PYTHON_TENSOR_H

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "rafter/rafter.h"

namespace rafter {

/* PyTorch turns the exception into a RuntimeError. */
inline void check_shim(AOTITorchError error, const char *what) {
    if (error != AOTI_TORCH_SUCCESS)
        throw std::runtime_error(std::string("rafter: PyTorch failed in ") + what);
}

struct Device {
    int32_t type, index; /* the shim's numbers */
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

/* PyTorch's number for a dtype of Rafter; the table is in the order of rafter_dtype. */
inline int32_t torch_dtype(rafter_dtype dtype) {
    static const int32_t numbers[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                      aoti_torch_dtype_float16(), aoti_torch_dtype_int32(),
                                      aoti_torch_dtype_int64(),   aoti_torch_dtype_uint8()};
    return numbers[dtype];
}

/* Dtypes that no op supports are here too: the library refuses them by name. */
inline DLDataType dl_dtype(int32_t number) {
    static const struct {
        int32_t number;
        DLDataType dtype;
    } known[] = {
        {torch_dtype(RAFTER_F32), {kDLFloat, 32, 1}},
        {torch_dtype(RAFTER_BF16), {kDLBfloat, 16, 1}},
        {torch_dtype(RAFTER_F16), {kDLFloat, 16, 1}},
        {torch_dtype(RAFTER_I64), {kDLInt, 64, 1}},
        {torch_dtype(RAFTER_I32), {kDLInt, 32, 1}},
        {torch_dtype(RAFTER_U8), {kDLUInt, 8, 1}},
        {aoti_torch_dtype_float64(), {kDLFloat, 64, 1}},
        {aoti_torch_dtype_int8(), {kDLInt, 8, 1}},
        {aoti_torch_dtype_int16(), {kDLInt, 16, 1}},
        {aoti_torch_dtype_bool(), {kDLBool, 8, 1}},
        {aoti_torch_dtype_complex64(), {kDLComplex, 64, 1}},
        {aoti_torch_dtype_complex128(), {kDLComplex, 128, 1}},
        {aoti_torch_dtype_float8_e4m3fn(), {kDLFloat8_e4m3fn, 8, 1}},
        {aoti_torch_dtype_float8_e4m3fnuz(), {kDLFloat8_e4m3fnuz, 8, 1}},
        {aoti_torch_dtype_float8_e5m2(), {kDLFloat8_e5m2, 8, 1}},
        {aoti_torch_dtype_float8_e5m2fnuz(), {kDLFloat8_e5m2fnuz, 8, 1}},
    };
    for (const auto &entry : known)
        if (entry.number == number)
            return entry.dtype;
    return {0xff, static_cast<uint8_t>(8 * aoti_torch_dtype_element_size(number)), 1};
}

/* Asks for huge pages for a large block that nobody has written yet, as NumPy does for its arrays: the kernel
 * then clears it in 2 MiB instead of 4 KiB per page fault. */
inline void ask_for_huge_pages(void *memory, int64_t bytes) {
    constexpr int64_t LARGE = 4 << 20; /* glibc reuses smaller blocks, whose pages are there already */
    if (bytes < LARGE)
        return;
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory), end = begin + static_cast<uintptr_t>(bytes);
    const uintptr_t first = (begin + page - 1) / page * page; /* whole pages: others belong to the allocator, too */
    const int kept = errno;
    madvise(reinterpret_cast<void *>(first), end / page * page - first, MADV_HUGEPAGE); /* only a hint */
    errno = kept;
}

/* Owns a tensor, or is empty. */
class Tensor {
  public:
    enum { MAX_DIMS = 64 }; /* PyTorch's limit */

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

    /* A new contiguous tensor. A schema has a fixed number of results, so a result that is not
     * wanted is a tensor without elements, and its dl() is NULL. */
    static Tensor empty(const int64_t *shape, int dims, int32_t dtype, Device device, bool wanted = true) {
        int64_t strides[MAX_DIMS], zero = 0;
        if (!wanted)
            shape = &zero, dims = 1;
        int64_t stride = 1;
        for (int d = dims - 1; d >= 0; d--) {
            strides[d] = stride;
            stride *= shape[d] > 1 ? shape[d] : 1;
        }
        AtenTensorHandle handle = nullptr;
        check_shim(aoti_torch_empty_strided(dims, shape, strides, dtype, device.type, device.index, &handle), "empty");
        Tensor tensor(handle);
        tensor.wanted_ = wanted;
        tensor.expect_writes();
        return tensor;
    }

    /* A new tensor with this one's shape and the strides that torch.empty_like would give it. */
    Tensor empty_like(bool wanted = true) const {
        if (!wanted || contiguous())
            return empty(dl_.shape, dl_.ndim, dtype_, device_, wanted);
        StableIValue stack[6] = {torch::stable::detail::from(new_handle())}; /* others: None */
        check_shim(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION), "empty_like");
        Tensor tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
        tensor.expect_writes();
        return tensor;
    }

    bool present() const {
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
    /* A new tensor's memory is dense. */
    void expect_writes() const {
        int64_t bytes = dl_.dtype.bits / 8;
        for (int d = 0; d < dl_.ndim; d++)
            bytes *= dl_.shape[d];
        if (device_.type == aoti_torch_device_type_cpu())
            ask_for_huge_pages(dl_.data, bytes);
    }
    bool contiguous() const {
        int64_t stride = 1;
        for (int d = dl_.ndim - 1; d >= 0; d--) {
            if (dl_.shape[d] != 1 && dl_.strides[d] != stride)
                return false;
            stride *= dl_.shape[d];
        }
        return true;
    }
    AtenTensorHandle new_handle() const {
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

/* One boxed call. It owns the arguments on the stack: take all of them, in the order of the schema,
 * then return the results, which replace them. */
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
    std::optional<std::string> optional_text() {
        return take<std::optional<std::string>>();
    }

    /* The device of the first tensor. Throws if another tensor is on a different one. Taking an
     * argument does not throw that: the arguments left on the stack would leak. */
    Device device() const {
        if (!device_error_.empty())
            throw std::runtime_error(device_error_);
        return device_;
    }

    template <class... Results> void return_tensors(Results &&...results) {
        int i = 0;
        ((stack_[i++] = torch::stable::detail::from(results.release())), ...);
    }

  private:
    template <class T> T take() {
        return torch::stable::detail::to<T>(stack_[taken_++]);
    }
    Tensor same_device(Tensor tensor) {
        if (!has_device_)
            device_ = tensor.device(), has_device_ = true;
        else if (!(tensor.device() == device_))
            device_error_ = "rafter: argument " + std::to_string(taken_) + " is on " + tensor.device().name() +
                            ", wanted the first tensor's device, " + device_.name();
        return tensor;
    }

    StableIValue *stack_;
    int taken_ = 0;
    bool has_device_ = false;
    Device device_ = {};
    std::string device_error_;
};

} // namespace rafter

#endif
