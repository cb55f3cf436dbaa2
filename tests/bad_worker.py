# SPDX-License-Identifier: Apache-2.0
"""A worker for tests/command.sh, without PyTorch. Of logsumexp's columns `ptr` dies, `rtr` never answers, `to` is wrong, and `toc` is
right, although the columns before it crash the process or give wrong results. RAFTER_TEST_RTR has `rtr` misbehave in another way."""
import json
import math
import mmap
import os
import socket
import struct
import sys
import time

channel = socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="utf-8")


def say(**answer):
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


def logsumexp(path, x):
    """Rows of the bf16 tensor that the tool shared."""
    count, last = math.prod(x["shape"]), x["shape"][-1]
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        words = struct.unpack_from(f"<{count}H", memory, x["at"])
    values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(word << 16 for word in words)))
    return [math.log(math.fsum(math.exp(v) for v in values[i:i + last])) for i in range(0, count, last)]


say(python="3", torch="none")
row, columns = None, {}
for line in channel:
    order = json.loads(line)
    column = columns.get(order.get("session"))
    if order["do"] == "row":
        row = order
    if order["do"] == "open":
        column = columns[order["session"]] = order["column"]
        if column == "ptr":
            os.abort()
        if column == "rtr":
            misbehaviour = os.environ.get("RAFTER_TEST_RTR")
            if misbehaviour == "close":
                os.close(int(sys.argv[1]))
            while misbehaviour == "talk":
                os.write(int(sys.argv[1]), b" " * 65536)
            if misbehaviour != "exaggerate":
                time.sleep(1000)
    if order["do"] == "collect":
        result = logsumexp(row["path"], next(t for t in row["tensors"] if t["name"] == "x"))
        wanted = order["results"][0]
        if "indices" in wanted:
            sys.exit("the test has few rows, so all of them are requested")
        with open(order["path"], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            struct.pack_into(f"<{len(result)}f", memory, wanted["at"], *(2 * v if column == "to" else v for v in result))
        say(written=["lse"])
    elif order["do"] == "time":
        if column == "rtr":  # json.dumps would not write this
            channel.write('{"seconds": 1e999, "host": 1e-3}\n')
            channel.flush()
        else:
            say(seconds=1e-3, host=1e-3)
    else:
        say(first=0.5)
