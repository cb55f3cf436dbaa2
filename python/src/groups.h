/* SPDX-License-Identifier: Apache-2.0 */
/* torch.distributed's process groups as communicators of the library. */
#ifndef RAFTER_PYTHON_GROUPS_H
#define RAFTER_PYTHON_GROUPS_H

#include <memory>
#include <optional>
#include <string>

#include "tensor.h"

namespace rafter {

/* One process group. Its collectives are ops that _groups.py implements in Python: the stable ABI has
 * no process groups, and any backend that torch.distributed knows works this way. They run on PyTorch's
 * current stream, which is set to the one that the library names. */
class Group {
  public:
    Group(std::string name, int32_t rank, int32_t ranks, Device device);

    const rafter_communicator *communicator() const {
        return &communicator_;
    }
    /* The rows of all ranks, of which each has as many, in rank order: [rows, D], contiguous. Throws. */
    Tensor gathered(const Tensor &share);

  private:
    static int all_gather(void *user, const void *send, void *receive, size_t bytes, void *stream);
    static int all_reduce_sum(void *user, float *data, size_t count, void *stream);
    static int reduce_scatter_sum(void *user, const float *send, float *receive, size_t count, void *stream);
    static const char *describe(void *user, int error);
    Tensor view(const void *data, size_t count, rafter_dtype dtype) const;

    std::string name_, error_;
    rafter_communicator communicator_ = {};
    Device device_;
};

/* The groups of a call, from what text() in _groups.py returns: a part for the classes, a semicolon and a
 * part for the rows, each empty or "RANK RANKS FIRST_CLASS CLASSES SHARE NAME". (No line breaks: the Inductor of
 * PyTorch 2.11 writes such a text into a comment.) They stay where they are while they are in use: the
 * options point to them. */
struct Groups {
    std::unique_ptr<Group> classes, rows;
    int share = 0; /* 1: the input is this rank's share of the rows, and so is its gradient */

    Groups() = default;
    /* device: that of the call's tensors. */
    Groups(const std::string &text, Device device, rafter_loss_options &options);
};

} // namespace rafter

#endif
