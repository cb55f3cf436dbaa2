#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# linear_cross_entropy on the CPU by threads: time, share of the matrix peak, scaling and phases
# (lce_threads.c), then beside PyTorch in one run. About a minute on 16 cores.
#     bench/lce_threads.sh [BUILD [N D V THREADS...]]
# PYTHON: a Python with PyTorch (default python3).
set -eu
build=${1:-build}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 2048 2048 32768 1 2 4 8 16
for last; do :; done

lscpu 2>/dev/null | grep -E 'Model name|^CPU\(s\)|Thread|Socket|NUMA|L[123]|MHz' || true
echo "quota: $(cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || echo unknown)"
"$build/bench/rafter_lce_threads" "$@"

# The largest number of threads with other ways to wait and to bind.
n=$1 d=$2 v=$3
for setting in OMP_PROC_BIND=true OMP_WAIT_POLICY=active GOMP_SPINCOUNT=10000; do
    printf '\n%s\n' "$setting"
    env "$setting" "$build/bench/rafter_lce_threads" "$n" "$d" "$v" "$last" | sed -n '4p'
done

printf '\ntorch, %s threads\n' "$last"
OMP_NUM_THREADS=$last "${PYTHON:-python3}" - "$n" "$d" "$v" "$last" <<'PYTHON'
import statistics
import sys
import time

import torch
import torch.nn.functional as F

n, d, v, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
x = torch.randn(n, d).bfloat16().requires_grad_()
w = (torch.randn(v, d) / d ** 0.5).bfloat16().requires_grad_()
target = torch.randint(v, (n,))
times = []
for _ in range(6):
    x.grad = w.grad = None
    start = time.perf_counter()
    F.cross_entropy(F.linear(x, w), target).backward()
    times.append(time.perf_counter() - start)
print(f"torch {torch.__version__}: {1e3 * statistics.median(times[1:]):.1f} ms")
PYTHON
