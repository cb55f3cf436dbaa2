#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The elementwise and row ops by threads: shares of the roofline, and what keeps them from it
# (cpu_threads.c). About a minute on 16 cores.
#     bench/cpu_threads.sh [BUILD [THREADS...]]
set -eu
build=${1:-build}
[ $# -gt 0 ] && shift

lscpu 2>/dev/null | grep -E 'Model name|^CPU\(s\)|Thread|Socket|NUMA|L[123]|MHz' || true
echo "quota: $(cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || echo unknown)"
echo "huge pages: $(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null || echo unknown)"
"$build/bench/rafter_cpu_threads" "$@"
printf '\nThe same with threads that are bound to processors, the largest number only\n'
for last; do :; done
OMP_PROC_BIND=true "$build/bench/rafter_cpu_threads" "${last:-$(nproc)}" | sed -n '/^ops/,/^$/p'
