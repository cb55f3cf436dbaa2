# SPDX-License-Identifier: Apache-2.0
"""The worker that `rafter bench` starts for providers in Python: worker.py SOCKET cpu|cuda THREADS EVICT_BYTES EVICTIONS

Orders and answers go over the socket, one JSON object per line; see bench/worker.h. The inputs of a row, the indices of the
elements to check and the results are in a file that the tool shares. Before a call is timed, EVICT_BYTES of other data go
through the caches EVICTIONS times; with 0 bytes an untimed call is made instead.
"""
import json
import math
import mmap
import os
import socket
import sys
import time

MODES = ("fwd", "bwd", "fwd+bwd")


def say(channel, answer):
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


class Row:
    """The tensors of one row, on the device; sessions share them."""

    def __init__(self, order, device):
        self.op, self.options, self.path = order["op"], order["options"], order["path"]
        self.order, self.device, self.functions = order, device, {}
        self.fill()
        self.filled = self.sums()

    def fill(self):
        self.tensors, self.memory = {}, {}  # memory: the same, or what a view of the map is a view of
        for t in self.order["tensors"]:
            if "fill" in t:
                memory = drawn(t, self.device)
                self.tensors[t["name"]] = memory.as_strided(t["shape"], t["strides"], t["offset"])
            else:
                memory = view(mapped(self.path), t["dtype"], t["at"], t["shape"]).to(self.device, copy=True)
                self.tensors[t["name"]] = memory
            self.memory[t["name"]] = memory
        self.is_map = any("fill" in t for t in self.order["tensors"])

    def sums(self):
        """Checksums of the tensors, eight bytes at a time: they change if a column overwrites its inputs."""
        flat = (t.view(-1).view(torch.uint8) for t in self.memory.values())
        return [bits[:len(bits) // 8 * 8].view(torch.int64).sum().item() for bits in flat]

    def __getitem__(self, name):
        return self.tensors[name]

    def function(self, column):
        """The callable of the column, made once, so that forward and backward share compiled code."""
        if self.is_map and column not in peers.MAP_COLUMNS:
            raise NotImplementedError("it is not a column of the map")
        if column not in self.functions:
            self.functions[column] = maker(self.op, column)(self)
        return self.functions[column]


def maker(op, column):
    return getattr(peers, f"{op}_{column}")


def mapped(path, known={}):
    """The tool's shared file, mapped once, and again when it has grown."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if known.get("size") != size:
            known.update(size=size, memory=mmap.mmap(file.fileno(), size))
    return known["memory"]


def view(memory, dtype, at, shape):
    """A tensor over the bytes of the shared file."""
    return torch.frombuffer(memory, dtype=DTYPES[dtype], count=math.prod(shape), offset=at).view(shape)


def drawn(t, device, period=1048583):
    """The memory of a tensor of the map, filled with numbers that repeat after a prime period."""
    memory = torch.empty(t["elements"], dtype=DTYPES[t["dtype"]], device=device)
    first = memory[:period]
    if t["fill"] == "normal":
        first.normal_(t["shift"], t["scale"])
    elif t["fill"] == "uniform":
        first.uniform_(t["shift"], t["shift"] + t["scale"])
    elif t["fill"] == "labels":
        first.random_(t["low"], t["high"])
        if "ignored" in t:
            first[torch.rand(len(first), device=device) < 0.125] = t["ignored"]
    else:
        first.copy_(t["low"] + torch.arange(len(first), device=device) % t["high"])
    done = len(first)
    while done < len(memory):
        more = min(done, len(memory) - done)
        memory[done:done + more] = memory[:more]
        done += more
    return memory


class Session:
    """One provider on one row in one mode."""

    def __init__(self, row, column, mode):
        names, self.output = peers.OPS[row.op]
        names = [name for name in names if name in row.tensors]
        self.gradients = ["d" + name for name in names]
        self.originals = [row[name] for name in names]
        self.overwrites = getattr(maker(row.op, column), "overwrites", None)
        self.walks_graphs_once = getattr(maker(row.op, column), "walks_graphs_once", False)
        self.scratch_on_cpu = getattr(maker(row.op, column), "scratch_on_cpu", None)
        self.inputs = [(t.clone() if self.overwrites else t.detach()).requires_grad_() for t in self.originals]
        self.mode, self.edge, self.last, self.collected = mode, None, None, False
        self.upstream = self.given = row.tensors.get("d" + self.output)
        before = allocated()
        self.function = row.function(column)
        start = time.perf_counter()
        if mode != "fwd":
            self.make_graph()
        self.restore()
        self.call()  # compiles and tunes, if the column does
        synchronize()
        self.first = time.perf_counter() - start
        self.held = allocated() - before
        if row.sums() != row.filled:
            row.fill()
            raise RuntimeError("it writes over its inputs, which other columns read: mark it in peers.py")

    def make_graph(self):
        """Runs forward, for the graph that backward needs."""
        out = self.function(*self.inputs)
        self.upstream = torch.ones_like(out) if self.upstream is None else self.upstream.to(out.dtype)
        if out is self.inputs[0]:  # act none returns its input, and the gradient too
            self.edge = out
        elif self.mode == "bwd":  # the graph, without keeping the output alive if backward does not need it
            self.edge = torch.autograd.graph.get_gradient_edge(out)

    def restore(self):
        """Restores inputs that a call overwrites. Bypasses autograd, so that saved tensors still count as unchanged, which they are."""
        if self.overwrites == "backward" or (self.overwrites and self.mode != "bwd"):
            for mine, original in zip(self.inputs, self.originals):
                mine.data.copy_(original)

    def prepare(self):
        """Prepares a call; not part of the timed call."""
        self.restore()
        if self.mode == "bwd" and self.walks_graphs_once and self.edge is not self.inputs[0]:
            self.make_graph()

    def call(self):
        """(output or None, gradients or None)"""
        if self.mode == "fwd":
            return self.function(*self.inputs), None
        if self.edge is self.inputs[0]:
            return self.inputs[0], (self.upstream,)
        if self.mode == "bwd":
            keep = not self.walks_graphs_once
            return None, torch.autograd.grad([self.edge], self.inputs, [self.upstream], retain_graph=keep)
        out = self.function(*self.inputs)  # and backward as in a training step: into a fresh .grad
        out.backward(None if self.given is None and out.dim() == 0 else self.upstream)
        gradients = [t.grad for t in self.inputs]
        for t in self.inputs:
            t.grad = None
        return out, gradients

    def time(self):
        """Seconds of one call: on the device, and on the host until the call returns."""
        self.prepare()
        if EVICT == 0:
            self.call()
            self.prepare()
        elif CUDA:
            for _ in range(EVICTIONS):
                other.zero_()
        else:
            other.sum()
        if not CUDA:
            start = time.perf_counter()
            out = self.call()
            seconds = host = time.perf_counter() - start
        else:
            before.record()
            start = time.perf_counter()
            out = self.call()
            host = time.perf_counter() - start
            after.record()
            after.synchronize()
            seconds = 1e-3 * before.elapsed_time(after)
        if not self.collected:
            self.last = out
        return {"seconds": seconds, "host": host}

    def collect(self, path, wanted):
        """Writes the last call's results to the shared file; returns which of the wanted ones exist."""
        out, gradients = self.last
        results = {self.output: out} if out is not None else {}
        if gradients is not None:
            results.update(zip(self.gradients, gradients))
        written = []
        memory = mapped(path)
        for w in wanted:
            if w["name"] not in results:
                continue
            value = results[w["name"]].detach().reshape(-1)
            if "indices" in w:
                value = value[view(memory, "int64", w["indices"], [w["count"]]).to(value.device)]
            view(memory, w["dtype"], w["at"], [w["count"]]).copy_(value)
            written.append(w["name"])
        self.last, self.collected = None, True
        return {"written": written}

    def memory(self):
        """Peak bytes of the call beyond the row's inputs."""
        if self.scratch_on_cpu and not CUDA:
            raise NotImplementedError(f"its scratch memory on a CPU is {self.scratch_on_cpu}, not PyTorch's")
        self.last = None
        base = allocated() - self.held
        self.prepare()
        if CUDA:
            synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.call()
            synchronize()
            return {"bytes": torch.cuda.max_memory_allocated() - base}
        return {"bytes": self.saved() + cpu_peak(self.call)}

    def saved(self):
        """On a CPU, which has no allocator statistics: the bytes that backward's graph holds beyond the inputs."""
        if self.mode != "bwd" or self.edge is self.inputs[0]:
            return 0
        inputs = {t.untyped_storage().data_ptr() for t in self.inputs}
        kept = {}

        def pack(t):
            if t.untyped_storage().data_ptr() not in inputs:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = self.function(*self.inputs)
        del out
        return sum(kept.values())


def cpu_peak(call):
    """The peak of allocated minus freed bytes of the CPU allocator during the call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = call()
    del out
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def matrix_rate(dtype, size=8192):
    """Flops per second of a square product of random matrices, the best of several: the practical peak of the device."""
    a, b = (torch.randn(size, size, device=DEVICE).to(DTYPES[dtype]) for _ in range(2))
    best = math.inf
    for _ in range(10):
        synchronize()
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize()
        best = min(best, time.perf_counter() - start)
    return {"rate": 2 * size**3 / best}


def allocated():
    return torch.cuda.memory_allocated() if CUDA else 0


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def reason(error):
    """The first line of the error, which fits below a table."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0].strip() if lines else ""
    return text if isinstance(error, ImportError) and text else f"{type(error).__name__}: {text}"


def obey(order, state):
    do = order["do"]
    if do == "row":
        state["sessions"].clear()
        state["row"] = None
        if CUDA:
            torch.cuda.empty_cache()
        state["row"] = Row(order, DEVICE)
        return {}
    if do == "open":
        session = Session(state["row"], order["column"], order["mode"])
        state["sessions"][order["session"]] = session
        return {"first": session.first, "overwrites": int(bool(session.overwrites))}
    if do == "matrix":
        return matrix_rate(order["dtype"])
    if do == "close":
        state["sessions"].pop(order["session"], None)
        return {}
    session = state["sessions"][order["session"]]
    if do == "time":
        return session.time()
    if do == "collect":
        return session.collect(order["path"], order["results"])
    if do == "memory":
        return session.memory()
    raise ValueError(f"no such order: {do}")


def serve(channel):
    state = {"row": None, "sessions": {}}
    for line in channel:
        order = json.loads(line)
        try:
            answer = obey(order, state)
        except ImportError as error:
            answer = {"error": reason(error), "missing": True}
        except Exception as error:  # whatever it is, only this column's cell is lost
            answer = {"error": reason(error)}
        say(channel, answer)


def greet():
    greeting = {"python": sys.version.split()[0], "torch": torch.__version__}
    if CUDA:
        greeting["cuda"] = torch.version.cuda
        try:
            import nvidia.cudnn

            greeting["cudnn"] = os.path.join(list(nvidia.cudnn.__path__)[0], "lib", "libcudnn.so.9")
        except ImportError:
            pass
    return greeting


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="utf-8")
    CUDA, EVICT, EVICTIONS = sys.argv[2] == "cuda", int(sys.argv[4]), int(sys.argv[5])
    try:
        import torch

        import peers
    except ImportError as missing:
        say(channel, {"error": f"{os.path.basename(sys.executable)}: {missing}"})
        sys.exit()
    DEVICE = torch.device(sys.argv[2])
    DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int64": torch.int64,
              "int32": torch.int32}
    torch.set_num_threads(int(sys.argv[3]))
    if CUDA and not torch.cuda.is_available():
        say(channel, {"error": "torch sees no CUDA device"})
        sys.exit()
    other = torch.ones(max(EVICT, 4) // 4, dtype=torch.float32, device=DEVICE)
    if CUDA:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    say(channel, greet())
    serve(channel)
