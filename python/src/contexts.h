/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the rafter_context for a call: one per CPU thread, one per CUDA device and stream. */
#ifndef RAFTER_PYTHON_CONTEXTS_H
#define RAFTER_PYTHON_CONTEXTS_H

#include <mutex>

#include "tensor.h"

namespace rafter {

/* Holds a context for PyTorch's current stream on `device`, with as many threads as PyTorch would
 * use, until the end of the scope. `op` names the op in error messages. */
class Session {
  public:
    Session(const char *op, Device device);

    operator rafter_context *() const {
        return context_;
    }
    /* Throws the library's error message unless the status is RAFTER_OK: as an IndexError for a
     * label or a dim out of range, else as a RuntimeError. */
    void operator()(rafter_status status) const;

  private:
    const char *op_;
    rafter_context *context_;
    std::unique_lock<std::mutex> lock_; /* CUDA only: backward runs on another thread */
};

} // namespace rafter

/* Sets whether later calls are batch invariant, 0 or 1; -1 only asks. Returns what it was before. */
extern "C" __attribute__((visibility("default"))) int32_t rafter_torch_batch_invariant(int32_t mode);

#endif
