#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy on a GPU, beside PyTorch: time, peak memory and error of loss and both gradients in one table.

    bench/lce_compare.py [--library build/librafter.so] [--shapes N,D,V ...] [--normal] [--rounds 12] [--errors] [--kernels]

All providers run in turn in every round, so that they share the chip's temperature and clock; a
cell is the median. Peak memory includes inputs, gradients and everything that a provider allocates.
`--normal` draws W as in the seeds' tables, with standard deviation 1 instead of 1/sqrt(D).
`--kernels` adds the time of each kernel of each provider, from PyTorch's profiler; it pauses between
providers, so the chip is cooler than for the table.
"""
import argparse
import ctypes as c
import math
import os
import statistics

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile


class Device(c.Structure):
    _fields_ = [("device_type", c.c_int32), ("device_id", c.c_int32)]


class DataType(c.Structure):
    _fields_ = [("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device", Device), ("ndim", c.c_int32), ("dtype", DataType),
                ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


class ContextOptions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("device", Device), ("stream", c.c_void_p), ("threads", c.c_int32),
                ("reserved", c.c_int32), ("variant", c.c_char_p), ("allocate", c.c_void_p), ("release", c.c_void_p),
                ("user", c.c_void_p)]


TENSORS = "x weight bias target loss row_loss lse logprob entropy argmax dloss dx dweight dbias".split()


class Args(c.Structure):
    _fields_ = ([("size", c.c_size_t), ("options", c.c_void_p), ("mode", c.c_int), ("accumulate", c.c_int),
                 ("accumulate_into_dweight", c.c_int32), ("reserved", c.c_int32), ("budget", c.c_size_t)]
                + [(name, c.POINTER(Tensor)) for name in TENSORS]
                + [("workspace", c.c_void_p), ("workspace_bytes", c.c_size_t)])


CODES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.int64: (0, 64)}


def as_dlpack(t):
    code, bits = CODES[t.dtype]
    n = t.dim()
    return Tensor(t.data_ptr(), Device(2, t.device.index or 0), n, DataType(code, bits, 1),
                  (c.c_int64 * max(n, 1))(*t.shape), (c.c_int64 * max(n, 1))(*t.stride()), 0)


class Rafter:
    AUTO, FAST, COMPACT = range(3)

    def __init__(self, path):
        os.environ.setdefault("RAFTER_CUDA_LIBRARY", os.path.join(os.path.dirname(path), "librafter_cuda.so.0"))
        self.library = c.CDLL(path)
        self.library.rafter_last_error.restype = c.c_char_p
        self.context = c.c_void_p()
        options = ContextOptions(size=c.sizeof(ContextOptions), device=Device(2, 0),
                                 stream=torch.cuda.current_stream().cuda_stream)
        if self.library.rafter_context_create(c.byref(self.context), c.byref(options)):
            raise RuntimeError(self.library.rafter_last_error(None).decode())

    def call(self, function, *args):
        if function(self.context, *args):
            raise RuntimeError(self.library.rafter_last_error(self.context).decode())

    def prepare(self, mode, native, budget=0, backward=False, **tensors):
        """A function that makes the call, and the bytes of its workspace."""
        held = {name: as_dlpack(t) for name, t in tensors.items()}
        args = Args(size=c.sizeof(Args), mode=mode, accumulate=native, budget=budget,
                    **{name: c.pointer(t) for name, t in held.items()})
        size = c.c_size_t()
        self.call(self.library.rafter_linear_cross_entropy_workspace, c.byref(args), int(backward), c.byref(size))
        workspace = torch.empty(size.value + 1, dtype=torch.uint8, device="cuda")
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size.value
        function = (self.library.rafter_linear_cross_entropy_backward if backward
                    else self.library.rafter_linear_cross_entropy_forward)

        def run(_held=(held, tensors, workspace)):
            self.call(function, c.byref(args))
        return run, size.value


def reference(x, w, y):
    """Loss in fp64, gradients in fp32 from fp32 logits; of the rows that are not ignored."""
    kept = (y >= 0).nonzero()[:, 0]
    all_dx = torch.zeros_like(x, dtype=torch.float32)
    x, y = x[kept], y[kept]
    n = x.shape[0]
    wf = w.float()
    loss, dx, dw = 0.0, torch.empty_like(x, dtype=torch.float32), torch.zeros_like(wf)
    for i in range(0, n, 1024):
        z = x[i:i + 1024].float() @ wf.T
        lse = torch.logsumexp(z.double() if z.numel() < 2**28 else z, -1).double()
        rows = torch.arange(z.shape[0], device="cuda")
        loss += (lse - z[rows, y[i:i + 1024]].double()).sum().item()
        dz = torch.exp(z - lse.float()[:, None])
        dz[rows, y[i:i + 1024]] -= 1
        dx[i:i + 1024] = dz @ wf / n
        dw += dz.T @ x[i:i + 1024].float() / n
    all_dx[kept] = dx
    return loss / n, all_dx, dw


def off(a, reference):
    """Relative Frobenius error."""
    return ((a.float() - reference).norm() / reference.norm()).item()


def print_kernels(name, run, calls=2):
    """What the kernels of a call take, most first."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    kernels = {}
    for event in profiler.events():
        kernels.setdefault(event.name, []).append(event.device_time)
    print(f"  {name}: kernels {sum(map(sum, kernels.values())) / calls / 1e3:.2f} ms")
    for kernel, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:8]:
        total, count = sum(times) / calls / 1e3, len(times) // calls
        print(f"    {total:8.3f} ms  {count:4d} x {statistics.mean(times):9.1f} us  {kernel[:100]}")


def table(rafter, shape, scale, args):
    n, d, v = shape
    torch.manual_seed(1)
    x = torch.randn(n, d, dtype=torch.bfloat16, device="cuda")
    w = (torch.randn(v, d, device="cuda") * scale).bfloat16()
    y = torch.randint(0, v, (n,), device="cuda")
    y[torch.rand(n, device="cuda") < args.ignored] = -100
    inputs = torch.cuda.memory_allocated()
    providers = {}

    def add_rafter(name, mode, native, gradients=True, budget=0):
        def make():
            out = {"loss": torch.empty((), device="cuda")}
            if gradients:
                out.update(dx=torch.empty_like(x), dweight=torch.empty_like(w))
            run, size = rafter.prepare(mode, native, budget, x=x, weight=w, target=y, **out)
            return run, out, size
        providers[name] = make

    def add_torch(name, function, gradients=True):
        def make():
            xs, ws = x.detach().requires_grad_(gradients), w.detach().requires_grad_(gradients)
            out = {}

            def run():
                xs.grad = ws.grad = None
                out["loss"] = loss = function(xs, ws, y)
                if gradients:
                    loss.backward()
                    out.update(dx=xs.grad, dweight=ws.grad)
            return run, out, 0
        providers[name] = make

    def plain(xs, ws, ys):
        return F.cross_entropy(F.linear(xs, ws), ys)

    add_rafter("fast", rafter.FAST, 0)
    add_rafter("native", rafter.FAST, 1)
    add_rafter("compact", rafter.COMPACT, 0)
    add_rafter("forward", rafter.AUTO, 0, gradients=False)
    if not args.ours:
        add_torch("torch", plain)
        add_torch("torch forward", plain, gradients=False)
        if args.compile:
            add_torch("compile", torch.compile(plain))

    want = reference(x, w, y) if args.errors else None
    live, lines = {}, {}
    for name, make in providers.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        try:
            run, out, size = make()
            run()
            torch.cuda.synchronize()
        except Exception as error:  # a provider that cannot is a line of the table
            lines[name] = f"{name:14} {error}"
            continue
        peak = inputs + torch.cuda.max_memory_allocated() - held
        line = f"{peak / 2**30:8.3f} GiB  workspace {size / 2**20:8.1f} MiB"
        if want:
            line += f"  loss off {abs(out['loss'].item() / want[0] - 1):.1e}"
            if "dx" in out:
                line += f"  dx {off(out['dx'], want[1]):.2e}  dw {off(out['dweight'], want[2]):.2e}"
        lines[name] = line
        live[name] = run
        out = None
    want = None
    times = {name: [] for name in live}
    for round_ in range(args.rounds + 2):
        for name, run in live.items():
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            run()
            after.record()
            after.synchronize()
            if round_ >= 2:
                times[name].append(before.elapsed_time(after))
    print(f"N {n} D {d} V {v}, W of standard deviation {scale:.4g}, {args.ignored:.0%} of the rows ignored", flush=True)
    for name in providers:
        if name in live:
            ms = statistics.median(times[name])
            products = 1 if "forward" in name else 3
            rate = products * 2 * n * d * v / ms / 1e9
            print(f"  {name:14} {ms:9.3f} ms (least {min(times[name]):9.3f}) {rate:6.0f} TFLOP/s  {lines[name]}", flush=True)
        else:
            print("  " + lines[name], flush=True)
    if args.kernels:
        for name, run in live.items():
            print_kernels(name, run)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default=os.path.join(os.path.dirname(__file__), "..", "build", "librafter.so"))
    parser.add_argument("--shapes", nargs="*", default=["12288,4096,131072", "4096,4096,128256"])
    parser.add_argument("--normal", action="store_true")
    parser.add_argument("--ignored", type=float, default=0, help="a share of the rows, at random")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--errors", action="store_true", help="against fp32 gradients; takes memory and seconds")
    parser.add_argument("--kernels", action="store_true", help="what each kernel takes")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--ours", action="store_true", help="no torch")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rafter = Rafter(os.path.abspath(args.library))
    for shape in args.shapes:
        n, d, v = map(int, shape.split(","))
        table(rafter, (n, d, v), 1.0 if args.normal else 1 / math.sqrt(d), args)


if __name__ == "__main__":
    main()
