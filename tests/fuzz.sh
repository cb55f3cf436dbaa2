#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Many random calls of the API (tests/fuzz.c), under AddressSanitizer and UndefinedBehaviorSanitizer,
# in one process per processor. Needs a C compiler with these sanitizers, CMake and Ninja or make.
#
#     tests/fuzz.sh [CALLS [SEED [BUILD]]]
#
# CALLS (default 10000000) are shared by the processes; call i has the seed SEED + i (default 1). One
# call in 20 is of ordinary size, the others are small: 6000 calls a second and core. BUILD (default build/fuzz_calls) is made if
# it is not there. Prints a line every 10 seconds, and the sum of all processes at the end; a failure
# with its seed. Exit status: 1 if a call failed, a sanitizer found something, or calls are missing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
calls=${1:-10000000}
seed=${2:-1}
build=${3:-$root/build/fuzz_calls}
processes=$(nproc)
if [ ! -x "$build/tests/test_fuzz" ]; then
    generator=$(command -v ninja >/dev/null && echo Ninja || echo 'Unix Makefiles')
    cmake -S "$root" -B "$build" -G "$generator" -DRAFTER_SANITIZE=address,undefined -DRAFTER_BENCH=OFF -DRAFTER_PYTHON=OFF \
        -DRAFTER_CUDA=OFF >/dev/null
    cmake --build "$build" --target test_fuzz --parallel "$processes" >"$build/log" 2>&1 || {
        tail -n 20 "$build/log"
        exit 1
    }
fi

logs=$build/fuzz-logs
rm -rf "$logs"
mkdir -p "$logs"
# Off: the check for uses of the stack after a return, which is on by default from GCC 13 on. With it, on a machine with AVX-512, a
# store of 64 bytes to a local buffer faulted, as an aligned store to a frame that is not aligned does.
export ASAN_OPTIONS=detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1

# part NUMBER: this process's share, in batches, so that the log shows how far it is.
part() {
    local batch=10000 first count ordinary
    for ((first = $1 * batch; first < calls; first += processes * batch)); do
        count=$((calls - first < batch ? calls - first : batch))
        ordinary=$(((count + 19) / 20))
        "$build/tests/test_fuzz" "$ordinary" $((seed + first)) || return 1
        [ "$count" = "$ordinary" ] || "$build/tests/test_fuzz" $((count - ordinary)) $((seed + first + ordinary)) small || return 1
    done
}

total() { cat "$logs"/*.log | awk '/^[0-9]+ passed, [0-9]+ failed$/ { sum += $1 } END { print sum + 0 }'; }

pids=()
for ((i = 0; i < processes; i++)); do
    part "$i" >"$logs/$i.log" 2>&1 &
    pids+=($!)
done
start=$SECONDS
while [ -n "$(jobs -rp)" ]; do
    sleep 1
    (((SECONDS - start) % 10)) || echo "$((SECONDS - start)) s: $(total) calls"
done
status=0
for i in "${!pids[@]}"; do
    wait "${pids[$i]}" || {
        status=1
        tail -n 30 "$logs/$i.log"
    }
done
made=$(total)
echo "$made calls passed in $((SECONDS - start)) s, $calls wanted, seeds from $seed"
[ "$made" = "$calls" ] || status=1
exit $status
