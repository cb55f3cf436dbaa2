#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rafter's PyTorch package against torch and torch.compile, as users call them: forward, and forward + backward by autograd.

    bench/autograd_map.py [--device cuda|cpu] [--only REGEX] [--linear] [--random COUNT [--seed S]]
                          [--providers rafter,torch,compile,quack,...] [--rounds 15] [--compile-jobs 8] [--json FILE]

For every case and provider: the time of a forward call under no_grad, of forward + backward with fresh gradients, both by events
with the L2 cache flushed and the queue filled (what the device takes), and the wall time per call of forward + backward back to
back (what the host takes where it is slower than the device). Every round calls every provider once, in random order; medians.
On a CPU both are wall times: single calls after the caches were overwritten, and calls back to back; tensors are smaller.
Inputs are bf16 unless a case says otherwise. --linear takes linear_cross_entropy instead of the memory-bound ops,
--random draws shapes, layouts and options that nobody chose; with --linear those of linear_cross_entropy. It ends with the cases
where another provider is ahead.
Other providers are columns of bench/worker/peers.py (quack, quack_exp, liger_sm90, liger_fslce, ...), for plain calls of softmax,
cross_entropy and linear_cross_entropy.

--quick: small tensors on the CPU, no times; compares results and gradients with torch's: a test of this script.

torch.compile compiles for seconds per case: --compile-jobs processes do that first, into PyTorch's cache, and are not timed.
"""
import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker"))
import peers  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QUICK = "--quick" in sys.argv
DEVICE = "cpu" if QUICK or {"cpu", "--device=cpu"} & set(sys.argv) else "cuda"
MOST_ELEMENTS_LOG2 = 28 if DEVICE == "cuda" else 23  # of random tensors


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---- cases -------------------------------------------------------------------------------------------------------------
# A case: name, a function that makes the tensors {"x": requires a gradient, others: constants}, and a function per provider.


class Case:
    def __init__(self, name, make, rafter_call, torch_call, as_row=None):
        """as_row(tensors): the op, its tensors by the names of bench/worker/peers.py, and its options; None if no peer has it."""
        self.name, self.make, self.calls, self.as_row = name, make, {"rafter": rafter_call, "torch": torch_call}, as_row

    def call(self, provider, tensors):
        """The provider's call as a function of the tensors."""
        if provider == "compile":
            torch._dynamo.reset()
            return torch.compile(self.calls["torch"], dynamic=False)
        if provider in self.calls:
            return self.calls[provider]
        if not self.as_row:
            raise NotImplementedError("no peer has this call")
        op, row = self.as_row(tensors)
        inputs = [row[name] for name in peers.OPS[op][0] if name in row.tensors]
        function = getattr(peers, f"{op}_{provider}")(row)
        return lambda tensors: function(*inputs)


class Row:
    """What a column of peers.py takes."""

    def __init__(self, options, **tensors):
        self.tensors, self.options = tensors, {**dict.fromkeys(peers.LOSS_NUMBERS, 0), "reduction": "mean", **options}

    def __getitem__(self, name):
        return self.tensors[name]


def sized(shape):
    """The shape, or a small one."""
    return tuple(min(n, 23) for n in shape) if QUICK else tuple(shape)


def tensor(shape, dtype):
    x = torch.empty(shape, device=DEVICE, dtype=dtype)
    return x.normal_()


def view_of(shape, dtype, layout):
    """x in a layout: "dense"; "transposed" of its last two dimensions; "sliced": rows of a longer tensor; "odd": one element past
    an aligned address; "shifted": logits[:, :-1] of language models."""
    if layout == "dense":
        return tensor(shape, dtype)
    if layout == "transposed":
        return tensor((*shape[:-2], shape[-1], shape[-2]), dtype).transpose(-1, -2)
    if layout == "sliced":
        return tensor((*shape[:-1], 2 * shape[-1]), dtype)[..., : shape[-1]]
    if layout == "shifted":
        return tensor((shape[0], shape[1] + 1, *shape[2:]), dtype)[:, :-1]
    count = 1
    for n in shape:
        count *= n
    return tensor((count + 1,), dtype)[1:].view(shape)


def named(op, shape, dtype, layout, extra=""):
    words = [op, "x".join(map(str, shape)), str(dtype).split(".")[1]]
    return " ".join(words + ([layout] if layout != "dense" else []) + ([extra] if extra else []))


def row_op(op, shape, dim, dtype=BF16, layout="dense"):
    import rafter

    shape = sized(shape)
    ours, theirs = getattr(rafter, op), getattr(torch, op)
    return Case(named(op, shape, dtype, layout, f"dim {dim}"), lambda: {"x": view_of(shape, dtype, layout)},
                lambda t: ours(t["x"], dim), lambda t: theirs(t["x"], dim),
                (lambda t: ("act", Row({"act": op, "dim": dim}, x=t["x"]))) if op == "softmax" else None)


def activation(op, shape, dtype=BF16, layout="dense"):
    import rafter

    shape = sized(shape)
    ours, theirs = getattr(rafter, op), getattr(F, op)
    return Case(named(op, shape, dtype, layout), lambda: {"x": view_of(shape, dtype, layout)},
                lambda t: ours(t["x"]), lambda t: theirs(t["x"]))


def cross_entropy(shape, dtype=BF16, layout="dense", classes=-1, ignored=0.0, **options):
    """Options of F.cross_entropy; `weight` True makes one; z_loss, softcap and logit_scale are computed by hand for torch."""
    import rafter

    shape = sized(shape)
    extra = [f"classes {classes}"] * (classes != -1) + [f"{k}={v}" for k, v in options.items()] + ["ignored"] * (ignored > 0)

    def make():
        x = view_of(shape, dtype, layout)
        rows = list(shape)
        count = rows.pop(classes)
        y = torch.randint(count, rows, device=DEVICE)
        if ignored:
            y[torch.rand(rows, device=DEVICE) < ignored] = -100
        return {"x": x, "y": y, "weight": torch.rand(count, device=DEVICE) + 0.5 if options.get("weight") else None}

    def split(t):
        given = {k: v for k, v in options.items() if k != "weight"}
        return t["x"], t["y"], t["weight"], given

    def ours(t):
        x, y, weight, given = split(t)
        return rafter.cross_entropy(x, y, weight, dim=classes, **given)

    def theirs(t):
        x, y, weight, given = split(t)
        given = dict(given)
        z_loss, softcap, scale = (given.pop(name, 0) for name in ("z_loss", "softcap", "logit_scale"))
        z = x.movedim(classes, -1).reshape(-1, shape[classes]) if classes == -1 else x
        if scale or softcap or z_loss:
            z = z.float()
        if scale:
            z = z * scale
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        y = y.reshape(-1) if classes == -1 else y
        loss = F.cross_entropy(z, y, None if weight is None else weight.to(z.dtype), **given)
        if z_loss:
            loss = loss + z_loss * torch.logsumexp(z, 1).square().mean()
        return loss

    plain = classes == -1 and not options
    return Case(named("cross_entropy", shape, dtype, layout, " ".join(extra)), make, ours, theirs,
                (lambda t: ("cross_entropy", Row({}, logits=t["x"], target=t["y"]))) if plain else None)


def lrpe(shape, act="none", dim=None, dtype=BF16, learned=False):
    import rafter

    shape = sized(shape)
    activate = {"none": lambda x: x, "softmax": lambda x: F.softmax(x, dim, dtype=FP32)}.get(act) or getattr(F, act)

    def make():
        return {"x": tensor(shape, dtype), "theta": torch.rand(shape[2], shape[3], device=DEVICE).requires_grad_(learned)}

    def ours(t):
        return rafter.lrpe_cosine(t["x"], t["theta"], act=act, dim=dim)

    def theirs(t):
        x = t["x"]
        angle = torch.arange(shape[1], device=DEVICE, dtype=FP32).view(-1, 1, 1) * t["theta"]
        y = activate(x)
        return torch.cat([y * angle.cos(), y * angle.sin()], -1).to(x.dtype)

    extra = " ".join([act] + [f"dim {dim}"] * (dim is not None) + ["dtheta"] * learned)
    return Case(named("lrpe_cosine", shape, dtype, "dense", extra), make, ours, theirs)


def linear_cross_entropy(n, d, v, dtype=BF16, **options):
    import rafter

    n, d, v = sized((n, d, v))
    def make():
        weight = (tensor((v, d), dtype) / d**0.5).requires_grad_()
        return {"x": tensor((n, d), dtype), "w": weight, "y": torch.randint(v, (n,), device=DEVICE)}

    def theirs(t):
        given = dict(options)
        softcap = given.pop("softcap", 0)
        z = F.linear(t["x"], t["w"])
        if softcap:
            z = softcap * torch.tanh(z.float() / softcap)
        return F.cross_entropy(z, t["y"], **given)

    return Case(named("linear_cross_entropy", (n, d, v), dtype, "dense", " ".join(f"{k}={x}" for k, x in options.items())), make,
                lambda t: rafter.linear_cross_entropy(t["x"], t["w"], t["y"], **options), theirs,
                lambda t: ("linear_cross_entropy", Row(options, x=t["x"], weight=t["w"], target=t["y"])))


def cases():
    """Shapes of models, and shapes beside them."""
    for shape, dim in (((32768, 4096), -1), ((16384, 32768), -1), ((4096, 131072), -1), ((16, 16, 2048, 2048), -1),
                       ((64, 1000, 513), 1), ((8192, 1000), -1), ((65536, 257), -1), ((1048576, 64), -1), ((128, 12, 197, 197), -1),
                       ((8192, 50257), -1),
                       ((8, 21, 512, 512), 1), ((4096, 8192), 0), ((2, 151936), -1), ((256, 1024), -1), ((8, 32, 1, 8192), -1),
                       ((1000000, 10), -1), ((32, 128, 77, 77), -1), ((2048, 16384, 3), 1), ((512, 7, 4096), 1)):
        yield row_op("softmax", shape, dim)
        if shape != (16, 16, 2048, 2048):
            yield row_op("logsumexp", shape, dim)
    for shape in ((16384, 8192), (8192, 1000), (4096, 4099)):
        yield row_op("softmax", shape, -1, FP32)
        yield row_op("logsumexp", shape, -1, FP32)
        yield row_op("softmax", shape, -1, BF16, "odd")
        yield row_op("logsumexp", shape, -1, BF16, "sliced")
        yield row_op("softmax", shape, -1, BF16, "transposed")
    for shape in ((1048576, 128), (65536, 1024), (4096, 128256), (512, 151936), (8192, 50257), (64, 1000), (1024, 32000),
                  (1000000, 10), (16384, 5000), (262144, 33), (128, 262144), (32768, 151936 // 8)):
        yield cross_entropy(shape)
        yield cross_entropy(shape, label_smoothing=0.1)
    yield cross_entropy((8192, 32000), weight=True)
    yield cross_entropy((8192, 32000), weight=True, label_smoothing=0.1)
    yield cross_entropy((8192, 32000), reduction="sum")
    yield cross_entropy((8192, 32000), z_loss=1e-4)
    yield cross_entropy((8192, 32000), softcap=30.0)
    yield cross_entropy((8192, 32000), logit_scale=0.5)
    yield cross_entropy((8192, 32000), ignored=0.5)
    yield cross_entropy((65536, 1000), softcap=30.0, label_smoothing=0.1)
    yield cross_entropy((4, 2047, 128256), layout="shifted")
    yield cross_entropy((8192, 50257), FP32)
    yield cross_entropy((8192, 1000), FP32)
    yield cross_entropy((8192, 32000), FP16, layout="odd")
    yield cross_entropy((8, 21, 512, 512), classes=1)
    yield cross_entropy((8, 21, 512, 512), FP32, classes=1)
    yield cross_entropy((8, 21, 512, 512), FP32, classes=1, weight=True)
    yield cross_entropy((16, 150, 256, 256), FP32, classes=1, label_smoothing=0.1)
    yield cross_entropy((2, 2, 1024, 1024), FP32, classes=1)
    yield cross_entropy((4, 32000, 2048), classes=1)
    for op in ("silu", "sigmoid", "relu"):
        yield activation(op, (8192, 14336))
        yield activation(op, (16384, 8192), layout="transposed")
        yield activation(op, (99999999,))
        yield activation(op, (64, 4096))
    yield activation("silu", (4096, 11008), layout="sliced")
    yield activation("silu", (8192, 8192), FP32)
    yield activation("silu", (4095, 4099), layout="odd")
    yield lrpe((2, 4096, 16, 256), "softmax", -1)
    yield lrpe((8, 4096, 12, 96), "sigmoid")
    yield lrpe((2, 8192, 32, 128), "silu")
    yield lrpe((1, 16384, 16, 64))
    yield lrpe((4, 2048, 16, 128), "softmax", 1)
    yield lrpe((1, 512, 8, 64), "relu")
    yield lrpe((2, 4096, 16, 128), "silu", learned=True)
    yield lrpe((2, 1000, 12, 80), "silu", dtype=FP32)


def random_shape(rng, reduced):
    """A shape and the reduced dimension, from its end. Sizes and the number of elements are log-uniform; half of the sizes are
    multiples of 8."""
    def size(most):
        n = int(2 ** rng.uniform(0, math.log2(max(most, 1)))) or 1
        return (n + 7) // 8 * 8 if rng.random() < 0.5 and n > 8 else n

    elements = int(2 ** rng.uniform(16, MOST_ELEMENTS_LOG2))
    if not reduced:
        columns = size(elements)
        return (max(elements // columns, 1), columns), -1
    length = max(size(min(elements, 262144)), 2)
    place = rng.choice((-1, -1, -1, -2, 0))
    others = max(elements // length, 1)
    inner = 1 if place == -1 else others if place == 0 else size(min(others, 4096))
    outer = max(others // inner, 1)
    if place == -1:
        return (outer, length), -1
    return ((length, inner), 0) if place == 0 else ((outer, length, inner), -2)


def random_cases(count, seed):
    """Shapes, layouts, dtypes and options that nobody chose."""
    rng = random.Random(seed)
    for _ in range(count):
        op = rng.choice(("softmax", "softmax", "logsumexp", "logsumexp", "cross_entropy", "cross_entropy", "cross_entropy",
                         "silu", "relu", "sigmoid", "lrpe_cosine"))
        dtype = rng.choice((BF16, BF16, FP16, FP32))
        layout = rng.choice(("dense", "dense", "dense", "odd", "sliced", "transposed"))
        if op in ("softmax", "logsumexp"):
            shape, dim = random_shape(rng, True)
            yield row_op(op, shape, dim, dtype, layout)
        elif op == "cross_entropy":
            shape, dim = random_shape(rng, True)
            options = {name: value for name, value in (("label_smoothing", 0.1), ("weight", True), ("z_loss", 1e-4),
                                                       ("softcap", 30.0), ("reduction", "none")) if rng.random() < 0.2}
            if dim == 0 or (dim != -1 and {"softcap", "z_loss"} & set(options)):  # torch takes classes in dimension 1
                options = {name: value for name, value in options.items() if name not in ("softcap", "z_loss")}
                shape = (1, *shape) if dim == 0 else shape
            ignored = rng.choice((0.0, 0.0, 0.3))
            if "z_loss" in options:  # theirs is a mean over all rows
                options, ignored = {name: options[name] for name in options if name not in ("weight", "reduction")}, 0.0
            yield cross_entropy(shape, dtype, layout, classes=-1 if dim == -1 else 1, ignored=ignored, **options)
        elif op == "lrpe_cosine":
            act, dim = rng.choice((("none", None), ("silu", None), ("relu", None), ("softmax", -1), ("softmax", 1)))
            depth, heads = rng.choice((32, 64, 80, 96, 100, 127, 128, 192, 256)), rng.choice((1, 4, 8, 12, 16, 32))
            batch = rng.choice((1, 2, 4, 8))
            length = max(int(2 ** rng.uniform(16, MOST_ELEMENTS_LOG2 - 2)) // (batch * heads * depth), 1)
            yield lrpe((batch, length, heads, depth), act, dim, dtype, learned=rng.random() < 0.3)
        else:
            yield activation(op, random_shape(rng, False)[0], dtype, layout)


def linear_cases(most_rows):
    """The sizes of models; then other dtypes and options."""
    for n in filter(lambda n: n <= most_rows, (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)):
        for d, v in ((4096, 128256), (2048, 151936), (3584, 256000), (5120, 151936), (7168, 129280), (768, 50257), (2048, 50304),
                     (1024, 32000)):
            yield linear_cross_entropy(n, d, v)
    for n in (64, 2048, 8192):
        yield linear_cross_entropy(n, 4096, 128256, FP16)
    yield linear_cross_entropy(4096, 2048, 32000, FP32)
    for options in ({"softcap": 30.0}, {"label_smoothing": 0.1}, {"softcap": 30.0, "label_smoothing": 0.1}):
        yield linear_cross_entropy(4096, 3584, 256000, **options)


def random_linear_cases(count, seed):
    """linear_cross_entropy of sizes, dtypes and options that nobody chose."""
    rng = random.Random(seed)
    most = 2 ** (38 if DEVICE == "cuda" else 32)  # multiplications of a product

    def size(low, high):
        n = int(2 ** rng.uniform(math.log2(low), math.log2(high)))
        return (n + 7) // 8 * 8 if rng.random() < 0.7 and n > 8 else n

    for _ in range(count):
        n, d, v = size(1, 8192), size(16, 4096), size(2, 131072)
        while n * d * v > most:
            n, v = (max(n // 2, 1), v) if n > v else (n, v // 2)
        options = {name: value for name, value in (("label_smoothing", 0.1), ("softcap", 30.0), ("reduction", "sum"))
                   if rng.random() < 0.2}
        yield linear_cross_entropy(n, d, v, rng.choice((BF16, BF16, FP16, FP32)), **options)


# ---- timing ------------------------------------------------------------------------------------------------------------


class CpuTimer:
    """Wall times, in milliseconds."""

    def __init__(self):
        self.flush = torch.empty(64 << 20, dtype=torch.uint8)

    def single(self, call):
        """Of one call, after the caches were overwritten."""
        self.flush.add_(1)
        return self.wall(call, 1)

    @staticmethod
    def wall(call, calls):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e3


class GpuTimer:
    def __init__(self):
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def single(self, call):
        """Milliseconds on the device, by events, behind work that lets the host run ahead."""
        self.flush.zero_()
        torch.cuda._sleep(2_000_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    @staticmethod
    def wall(call, calls):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / calls * 1e3


def runs_of(case, provider, tensors):
    """The forward and the forward + backward of a provider, as functions without arguments."""
    function = case.call(provider, tensors)
    with torch.no_grad():
        y = function(tensors)
        torch.manual_seed(2)
        # In y's own layout, as the next layer would hand it over.
        upstream = torch.empty_like(y).copy_(torch.randn(y.shape, device=y.device)) if y.dim() else torch.ones_like(y)
    wanted = [t for t in tensors.values() if t is not None and t.requires_grad]

    def forward():
        with torch.no_grad():
            function(tensors)

    def both():
        for t in wanted:
            t.grad = None
        y = function(tensors)
        if y.dim() == 0:
            y.backward()
        else:
            y.backward(upstream)

    both()
    return forward, both


def tensors_of(case):
    torch.manual_seed(1)
    tensors = case.make()
    tensors["x"] = tensors["x"].detach().requires_grad_()
    return tensors


def measure(case, providers, rounds, timer):
    tensors, runs, result = tensors_of(case), {}, {"case": case.name}
    for provider in providers:
        try:
            runs[provider] = runs_of(case, provider, tensors)
        except Exception as error:  # a provider that cannot is a hole with a reason
            say(f"  {provider}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    samples = {(p, what): [] for p in runs for what in ("forward", "both", "wall")}
    for _ in range(rounds):
        for provider in random.sample(list(runs), len(runs)):
            forward, both = runs[provider]
            samples[provider, "forward"].append(timer.single(forward))
            samples[provider, "both"].append(timer.single(both))
    for provider, (_, both) in runs.items():
        took = statistics.median(samples[provider, "both"])
        calls = 20 if took < 1 else 3
        for _ in range(3 if took < 20 else 1):
            samples[provider, "wall"].append(timer.wall(both, calls))
    for (provider, what), times in samples.items():
        result[f"{provider} {what}"] = statistics.median(times)
    return result


def show(result, providers):
    def ratio(what):
        others = [result[f"{p} {what}"] for p in providers if p != "rafter" and f"{p} {what}" in result]
        ours = result.get(f"rafter {what}")
        return ours / min(others) if ours and others else float("nan")

    times = " ".join(f"{result.get(f'{p} {what}', float('nan')):9.4f}" for what in ("forward", "both", "wall") for p in providers)
    print(f"{ratio('forward'):5.2f} {ratio('both'):5.2f} {ratio('wall'):5.2f} | {times} | {result['case']}", flush=True)


def behind(results, providers):
    """Prints the cases where another provider is ahead by more than 3 %, the worst first."""
    for what in ("forward", "both", "wall"):
        ratios = []
        for result in results:
            others = [(result[f"{p} {what}"], p) for p in providers if p != "rafter" and f"{p} {what}" in result]
            if others and f"rafter {what}" in result:
                best, provider = min(others)
                ratios.append((result[f"rafter {what}"] / best, result[f"rafter {what}"], best, provider, result["case"]))
        worse = sorted((r for r in ratios if r[0] > 1.03), reverse=True)
        print(f"{what}: another provider is ahead by more than 3 % in {len(worse)} of {len(ratios)}")
        for ratio, ours, best, provider, name in worse[:40]:
            print(f"  {ratio:5.2f} {ours:9.4f} ms, {provider} {best:9.4f} ms | {name}")


def compare(case):
    """The largest differences of rafter's results and gradients from torch's, over their largest elements."""
    tensors, found = tensors_of(case), []
    for provider in ("rafter", "torch"):
        both = runs_of(case, provider, tensors)[1]
        both()
        with torch.no_grad():
            found.append([case.calls[provider](tensors)] + [t.grad for t in tensors.values() if t is not None and t.requires_grad])
    return max(((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30)).item()
               for ours, theirs in zip(*found))


def compile_ahead(args, count):
    """Fills PyTorch's cache of compiled code from several processes."""
    command = [sys.executable, __file__, "--device", DEVICE, "--only", args.only, "--compile-only", "--most-rows", str(args.most_rows)]
    command += ["--linear"] * args.linear + ["--random", str(args.random), "--seed", str(args.seed)]
    workers = [subprocess.Popen(command + ["--slice", f"{k}/{args.compile_jobs}"]) for k in range(min(args.compile_jobs, count))]
    for worker in workers:
        worker.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has a match of this regular expression")
    parser.add_argument("--providers", default="rafter,torch,compile")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile-jobs", type=int, default=8)
    parser.add_argument("--linear", action="store_true", help="linear_cross_entropy")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="so many random cases instead")
    parser.add_argument("--seed", type=int, default=1, help="of the random cases")
    parser.add_argument("--most-rows", type=int, default=1 << 40, help="--linear: cases of at most so many rows")
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="a test of this script")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--slice", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.random:
        listed = (random_linear_cases if args.linear else random_cases)(args.random, args.seed)
    else:
        listed = linear_cases(args.most_rows) if args.linear else cases()
    chosen = [c for c in listed if re.search(args.only, c.name)]
    providers = args.providers.split(",")
    if args.quick:
        for case in chosen:
            print(f"{compare(case):.1e} {case.name}")
        return
    torch._dynamo.config.cache_size_limit = 1000
    if args.compile_only:
        index, step = map(int, args.slice.split("/"))
        for case in chosen[index::step]:
            try:
                runs_of(case, "compile", tensors_of(case))
            except Exception as error:
                say(f"{case.name}: {error}")
        return
    begin = time.perf_counter()
    if "compile" in providers and args.compile_jobs > 1:
        compile_ahead(args, len(chosen))
        say(f"compiled in {time.perf_counter() - begin:.0f} s")
    print("rafter / best other: forward, forward + backward, wall | ms of each: " + ", ".join(
        f"{p} {what}" for what in ("forward", "both", "wall") for p in providers))
    results, timer = [], GpuTimer() if DEVICE == "cuda" else CpuTimer()
    for number, case in enumerate(chosen):
        results.append(measure(case, providers, args.rounds, timer))
        show(results[-1], providers)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        if number % 20 == 19:
            say(f"{number + 1} of {len(chosen)}, {time.perf_counter() - begin:.0f} s")
    behind(results, providers)
    if args.json:
        with open(args.json, "w") as file:
            where = ({"gpu": torch.cuda.get_device_name()} if DEVICE == "cuda" else {"cpu_threads": torch.get_num_threads()})
            json.dump({**where, "torch": torch.__version__, "rows": results}, file, indent=0)


if __name__ == "__main__":
    main()
