/* SPDX-License-Identifier: Apache-2.0 */
/* Which rafter_context serves a call: on the CPU one per thread, on CUDA one per device and stream. */
#ifndef RAFTER_PYTHON_CONTEXTS_H
#define RAFTER_PYTHON_CONTEXTS_H

#include <mutex>

#include "tensor.h"

namespace rafter {

/* A context for PyTorch's current stream on `device`, with as many threads as PyTorch would use, held until the end of
 * the scope. `op` is for the error sentence. */
class Session {
  public:
    Session(const char *op, Device device);

    operator rafter_context *() const {
        return context_;
    }
    /* Throws the library's sentence unless the status is RAFTER_OK. */
    void operator()(rafter_status status) const;

  private:
    const char *op_;
    rafter_context *context_;
    std::unique_lock<std::mutex> held_; /* CUDA only: backward runs on another thread than forward */
};

} // namespace rafter

#endif
