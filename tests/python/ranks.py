#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of ranks_*.py in several processes, which are ranks of a process group.

    PYTHONPATH=build/python tests/python/ranks.py SIZE [--backend gloo|nccl] [--device cpu|cuda] [MODULE...] [-k WORD]

All checks of a module run in the same processes, one after the other: starting Python and importing
PyTorch takes longer than any of them. A check is a function check_NAME(world) that every rank calls.
One that fails on some ranks only ends the run, because they may no longer be in step.
"""
import argparse
import datetime
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import types

FOLDER = os.path.dirname(os.path.abspath(__file__))
MODULES = ("ranks_losses", "ranks_bugs", "ranks_dtensor", "ranks_compile", "ranks_models")
TIMEOUT = 120  # seconds that a rank waits for the others


class Skip(Exception):
    """Raised by a check, on every rank, that this world cannot run."""


class World:
    """What a check gets."""

    def __init__(self, rank, size, device):
        import torch
        self.rank, self.size, self.device = rank, size, device
        self.group = torch.distributed.group.WORLD
        self.bits = hashlib.sha256()

    def same_bits(self, *tensors):
        """Asserts that every rank has the same bits: at the end of the check, all at once."""
        for t in tensors:
            self.bits.update(repr((t.dtype, t.shape, t.detach().cpu().reshape(-1).view(_bits(t)).tolist())).encode())

    def skip_unless(self, condition, reason):
        if not condition:
            raise Skip(reason)


def _bits(tensor):
    import torch
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _stand_in_for_pytest():
    """support.py imports pytest, which the checks do not need."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        sys.path.insert(0, FOLDER)
        import without_pytest
        without_pytest.install()


def work(rank, size, folder, backend, device, modules, word):
    import torch
    import torch.distributed.nn  # before init_process_group: see the end of examples/vocabulary_parallel.py
    _stand_in_for_pytest()
    sys.path.insert(0, FOLDER)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(os.path.join(folder, "store"), size)
    wait = datetime.timedelta(seconds=TIMEOUT)
    store.set_timeout(wait)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(backend, store=torch.distributed.PrefixStore("group", store), rank=rank,
                                         world_size=size, timeout=wait)
    world, outcomes, failed = World(rank, size, device), {}, False
    for name in modules:
        module = importlib.import_module(name)
        for check, function in list(vars(module).items()):
            if not check.startswith("check_") or word not in check:
                continue
            start = time.perf_counter()
            try:
                function(world)
                outcome = f"{world.bits.hexdigest()} ok"
            except Skip as reason:
                outcome = f"_ skipped: {reason}"
            except BaseException:
                outcome = f"rank {rank}: {traceback.format_exc()}"
            key = f"{check}/"
            store.set(key + str(rank), outcome)
            everyone = [store.get(key + str(r)).decode() for r in range(size)]
            bad = [o for o in everyone if o.startswith("rank")]
            if not bad and len({o.split(" ", 1)[0] for o in everyone}) > 1:
                bad = [f"ranks have different bits: {everyone}"]
            outcomes[check] = "\n".join(bad) if bad else everyone[0].split(" ", 1)[-1]
            if rank == 0:
                seconds = time.perf_counter() - start
                print(f"{check} {seconds:.2f} s {outcomes[check]}", file=sys.stderr, flush=True)
                with open(os.path.join(folder, "outcomes"), "w", encoding="utf-8") as file:
                    json.dump(outcomes, file)
            failed = failed or bool(bad)
            if 0 < len(bad) < size:
                return 1
    if not failed:
        torch.distributed.barrier()
    world.group = None  # the last reference: gloo's threads end with the group
    torch.distributed.destroy_process_group()
    return int(failed)


def launch(size, modules=MODULES, backend="gloo", device="cpu", word="", quiet=True):
    """Outcomes of the checks by name: "ok", "skipped: why", or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                       "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        processes = []
        for rank in range(size):
            log = open(os.path.join(folder, f"log{rank}"), "w+", encoding="utf-8")
            command = [sys.executable, os.path.abspath(__file__), str(size), "--backend", backend, "--device", device,
                       "-k", word, "--rank", str(rank), "--folder", folder, *modules]
            stderr = log if quiet else None
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=stderr, cwd=FOLDER)
            processes.append(types.SimpleNamespace(process=process, log=log))
        for each in processes:
            try:
                each.process.wait(timeout=5 * TIMEOUT)
            except subprocess.TimeoutExpired:
                each.process.kill()
        outcomes = {}
        if os.path.exists(os.path.join(folder, "outcomes")):
            with open(os.path.join(folder, "outcomes"), encoding="utf-8") as file:
                outcomes = json.load(file)
        for rank, each in enumerate(processes):
            each.log.seek(0)
            if each.process.returncode not in (0, 1):
                outcomes[f"rank {rank}"] = f"ended with {each.process.returncode}: {each.log.read()[-3000:]}"
            elif each.process.returncode == 1 and not any(_failed(o) for o in outcomes.values()):
                outcomes[f"rank {rank}"] = each.log.read()[-3000:]
            each.log.close()
        return outcomes


def _failed(outcome):
    return outcome != "ok" and not outcome.startswith("skipped")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", type=int)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-k", dest="word", default="")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    parser.add_argument("modules", nargs="*", default=MODULES)
    given = parser.parse_intermixed_args()
    if given.rank is not None:
        return work(given.rank, given.size, given.folder, given.backend, given.device, given.modules, given.word)
    outcomes = launch(given.size, given.modules or MODULES, given.backend, given.device, given.word, quiet=False)
    for name, outcome in outcomes.items():
        if name.startswith("rank "):  # those of checks are printed already
            print(f"{name}: {outcome}")
    failed = sum(map(_failed, outcomes.values()))
    print(f"{given.size} ranks, {given.backend}, {given.device}: {len(outcomes)} checks, {failed} failed")
    return bool(failed or not outcomes)


if __name__ == "__main__":
    sys.exit(main())
