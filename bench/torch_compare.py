#!/usr/bin/env python3
"""Times PyTorch on the rows of `rafter bench`: the same shapes, dtype and number of threads, one op after the other.

    bench/torch_compare.py [OP...] [--rafter build/bench/rafter] [--threads N] [any other option of rafter bench]

For each op it runs `rafter bench OP --json` and then PyTorch on every row of it, with the same rules: other data in the
caches before each call (unless --warm), at least five repeats or the time per cell, the median. The last column is torch's
time over Rafter's: 2.00 means that Rafter takes half the time.
"""
import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

# As in `rafter bench`: idle threads go to sleep soon. OpenMP reads it when torch is loaded.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
    os.environ.update(GOMP_SPINCOUNT="10000", KMP_BLOCKTIME="1")

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("torch_compare: PyTorch is not installed (pip install torch)")

OPS = ["cross_entropy", "linear_cross_entropy", "logsumexp", "act", "lrpe_cosine"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TITLE = re.compile(r"(?P<op>\w+)-speed-(?P<mode>fwd\+bwd|fwd|bwd)-(?P<rest>.+)")


def size(rest, name):
    return int(re.search(rf"(?:^|-){name}(\d+)", rest).group(1))


def activation(rest, softmax_dim):
    """The function that a title's act_... names."""
    kind = re.search(r"act_(\w+)", rest).group(1)
    if kind == "softmax":
        return lambda x: F.softmax(x, softmax_dim)
    return {"none": lambda x: x, "relu": F.relu, "sigmoid": torch.sigmoid, "silu": F.silu}[kind]


def cross_entropy(rest, x, dtype):
    rows = size(rest, "batch")
    logits = torch.randn(rows, x, dtype=dtype)
    target = torch.randint(0, x, (rows,))
    return [logits], lambda z: F.cross_entropy(z, target)


def linear_cross_entropy(rest, x, dtype):
    rows, features = size(rest, "batch"), size(rest, "dim")
    hidden = torch.randn(rows, features, dtype=dtype)
    weight = (torch.randn(x, features) / math.sqrt(features)).to(dtype)
    target = torch.randint(0, x, (rows,))
    return [hidden, weight], lambda h, w: F.cross_entropy(h @ w.T, target)


def logsumexp(rest, x, dtype):
    return [torch.randn(size(rest, "batch"), size(rest, "dim"), x, dtype=dtype)], lambda v: torch.logsumexp(v, -1)


def act(rest, x, dtype):
    dim = -1 if "dim_-1" in rest else -2
    return [torch.randn(size(rest, "batch"), size(rest, "head"), x, size(rest, "dim"), dtype=dtype)], activation(rest, dim)


def lrpe_cosine(rest, x, dtype):
    heads, features = size(rest, "head"), size(rest, "dim")
    theta = torch.rand(heads, features)
    f = activation(rest, -1 if "dim_-1" in rest else 1)

    def encode(v):
        angle = torch.arange(x, dtype=torch.float32).view(-1, 1, 1) * theta
        activated = f(v)
        return torch.cat([activated * angle.cos(), activated * angle.sin()], -1).to(v.dtype)

    return [torch.randn(size(rest, "batch"), x, heads, features, dtype=dtype)], encode


MAKERS = {"cross_entropy": cross_entropy, "lce": linear_cross_entropy, "logsumexp": logsumexp, "act": act,
          "lrpe_cosine": lrpe_cosine}


def caller(mode, inputs, function):
    """A function without arguments that does one forward, one backward or both."""
    for t in inputs:
        t.requires_grad_()
    if mode == "fwd":
        return lambda: function(*inputs)
    out = function(*inputs)
    upstream = torch.randn_like(out) if out.ndim else torch.ones_like(out)
    if mode == "bwd":
        if out is inputs[0]:  # act none: the gradient is handed through
            return lambda: upstream
        return lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    del out
    return lambda: torch.autograd.grad(function(*inputs), inputs, upstream)


def milliseconds(call, seconds, other):
    """Median time of a call; at least five unless they take more than four times the cell's time."""
    call()
    samples, used = [], 0.0
    while not ((len(samples) >= 5 and used >= seconds) or used >= 4 * seconds):
        begin = time.perf_counter()
        if other is None:
            call()
        else:
            other.sum()
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        samples.append(end - start)
        used += end - begin
    return 1e3 * statistics.median(samples)


def rafter_rows(binary, op, threads, rest):
    """The automatic choice's rows, from the binary itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        command = [binary, "bench", op, "--threads", str(threads), "--providers", "rafter", "--json", path, *rest]
        run = subprocess.run(command, stdout=subprocess.DEVNULL)
        if run.returncode != 0:
            sys.exit(f"torch_compare: {' '.join(command)} ended with status {run.returncode}")
        with open(path, encoding="utf-8") as file:
            return [row for row in json.load(file)["rows"] if row["median"] is not None]


def compare(rows, seconds, other):
    """Prints one op's tables; returns the ratios."""
    ratios, title = [], None
    for row in rows:
        match = TITLE.fullmatch(row["table"])
        if match is None:
            continue
        if row["table"] != title:
            title = row["table"]
            print(f"\n{title}:\n{'x':>10}{'rafter':>14}{'torch':>14}{'ratio':>9}")
        dtype = DTYPES[re.search(r"bf16|fp16|fp32", match["rest"]).group()]
        call = caller(match["mode"], *MAKERS[match["op"]](match["rest"], row["x"], dtype))
        torch_ms = milliseconds(call, seconds, other)
        ratio = torch_ms / row["median"]
        if "act_none" not in title or match["op"] != "act":  # nothing is computed there
            ratios.append(ratio)
        print(f"{row['x']:>10}{row['median']:>14.6f}{torch_ms:>14.6f}{ratio:>9.2f}", flush=True)
        del call
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s [OP...] [options]")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser.add_argument("--rafter", default=os.path.join(root, "build", "bench", "rafter"), help="the command's binary")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, help="time per cell, for both")
    parser.add_argument("--warm", action="store_true", help="leave a call's data in the caches")
    args, others = parser.parse_known_args()
    ops = [word for word in others if word in OPS + ["lce"]]
    rest = [word for word in others if word not in ops]
    if not os.access(args.rafter, os.X_OK):
        sys.exit(f"torch_compare: there is no command at {args.rafter} (build it, or say --rafter PATH)")
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    if args.seconds:
        rest += ["--seconds", str(args.seconds)]
    if args.warm:
        rest += ["--warm"]
    other = None if args.warm else torch.ones(64 << 20, dtype=torch.float32)  # 256 MiB
    print(f"torch {torch.__version__}, {args.threads} threads; milliseconds; ratio: torch over rafter")
    summary = []
    for op in ops or OPS:
        ratios = compare(rafter_rows(args.rafter, op, args.threads, rest), args.seconds or 0.2, other)
        if ratios:
            summary.append((op, min(ratios), statistics.geometric_mean(ratios)))
    print()
    for op, least, mean in summary:
        print(f"{op}: at least {least:.2f}, geometric mean {mean:.2f}")


if __name__ == "__main__":
    main()
