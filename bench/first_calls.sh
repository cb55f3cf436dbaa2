#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The cost of loading librafter_cuda and of every op's first call, for builds of that library in
# turn, each time in a new process: medians in ms.
#     bench/first_calls.sh RUNS BUILD [BUILD...]
# The programs are those of the first BUILD. Two builds that differ only in -DRAFTER_CUDA_SMALL show
# what nvcc's --compress-mode=size costs.
set -euo pipefail
runs=$1
shift
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for ((run = 0; run < runs; run++)); do
    for build; do
        RAFTER_CUDA_LIBRARY=$(realpath "$build/librafter_cuda.so") "$1/bench/rafter_first_calls" >>"$out/${build//\//_}"
    done
done
for build; do
    echo "$build: $(stat -Lc %s "$build/librafter_cuda.so") bytes"
    # The values of each position, sorted; the middle one.
    awk '{ for (i = 1; i <= NF; i++) if ($i ~ /^-?[0-9.]+$/) value[i, NR] = $i + 0; else name[i] = $i; fields = NF }
         END { for (i = 1; i <= fields; i++) {
                   if (i in name) { printf "%s  %s", (i > 1 ? "\n" : ""), name[i]; continue }
                   for (a = 1; a <= NR; a++) for (b = a + 1; b <= NR; b++)
                       if (value[i, b] < value[i, a]) { t = value[i, a]; value[i, a] = value[i, b]; value[i, b] = t }
                   printf " %.2f", value[i, int((NR + 1) / 2)] }
               print "" }' "$out/${build//\//_}"
done
