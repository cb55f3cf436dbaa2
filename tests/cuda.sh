#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests that need a GPU: every op's walk over all of its variants, tests/cuda/, the cases beyond
# 2^31 elements, the bench's own columns, and compute-sanitizer over a sample of the small cases.
#
#     tests/cuda.sh BUILD [STEP...]
#
# BUILD is a directory that was built with RAFTER_CUDA. Steps: walk, api, large, bench, memcheck,
# racecheck, initcheck, synccheck; all of them if none is named. The sanitizer's steps give every
# variant EACH problems per mode (default 2), walk takes one problem in WALK (default 1). LIMIT is
# the time limit of a job in seconds. Prints a line per job and, if one failed, the end of its
# output. Exit status: 1 if a job failed, 77 if there is no GPU.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(cd "${1:?the build directory is missing}" && pwd)
shift
steps=${*:-walk api large bench memcheck racecheck initcheck synccheck}
each=${EACH:-2}
sample=${WALK:-1}
logs=$build/cuda-tests
walk=$build/tests/test_walk
api=$build/tests/test_cuda
rm -rf "$logs"
mkdir -p "$logs"
mapfile -t ops < <(sed -n 's/^RAFTER_OP(\([a-z_]*\)).*/\1/p' "$root/src/ops/ops.inc")
processors=$(nproc) # before OMP_NUM_THREADS is set, which nproc would answer with
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=4
at_once=$((processors / 3 + 1))
parts=$((processors / 4 + 1)) # parts of a walk: the oracle, on the CPU, takes most of the time

# job NAME SECONDS COMMAND...: runs in the background, as soon as fewer than $at_once jobs run.
job() {
    local name=$1 limit=${LIMIT:-$2}
    shift 2
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do
        wait -n
    done
    {
        local start=$SECONDS
        timeout "$limit" "$@" >"$logs/$name.log" 2>&1
        echo "$? $((SECONDS - start))" >"$logs/$name.end"
    } &
}

# walk OP: in parts, one per processor.
walk() {
    local at_once=$processors part
    for ((part = 0; part < parts; part++)); do
        OMP_NUM_THREADS=1 job "walk-$1-$part" 400 "$walk" "$1" --device cuda --every $((sample * parts)) --from $((sample * part))
    done
}

# Adds up how many problems each variant served in the parts of the walks. A variant that served
# none is a failure.
served() {
    cat "$logs"/walk-*.log | awk '$3 == "served" { sum[$1 " " $2] += $4 }
        END { for (name in sum) { printf "%-52s %8d problems\n", name, sum[name]; bad += sum[name] == 0 && name !~ / (auto|hopper_over_ranks)$/ }
              print bad + 0, "variants served no problem"; exit (bad > 0) }'
}

sanitize() {
    local tool=$1 op except
    if ! command -v compute-sanitizer >/dev/null; then
        echo "compute-sanitizer is not installed: $tool is skipped"
        return
    fi
    # Every tensor in an allocation of its own, so that the checker knows its bounds.
    export RAFTER_TEST_EXACT_MEMORY=1
    # initcheck does not see what the TMA stores: the exponentials that finish_tiles_kernel reads.
    except=
    [ "$tool" != initcheck ] || except="--kernel-name-exclude kernel_substring=finish_tiles_kernel"
    for op in "${ops[@]}"; do
        # shellcheck disable=SC2086
        job "$tool-$op" 100 compute-sanitizer --tool "$tool" $except --error-exitcode 9 "$walk" "$op" --device cuda --each "$each"
    done
    # hopper_over_ranks serves calls of several ranks only.
    # shellcheck disable=SC2086
    job "$tool-groups" 100 compute-sanitizer --tool "$tool" $except --error-exitcode 9 "$build/tests/test_groups" linear_cross_entropy \
        --device cuda --every "${GROUPS_EVERY:-997}"
    unset RAFTER_TEST_EXACT_MEMORY
    wait
    ! grep -qs '^77 ' "$logs/$tool"-*.end || return 0
    job "$tool-variants" 10 bash -c "visited $tool"
}

# visited TOOL: fails, and names them, if the tool did not see all variants.
visited() {
    local op variant missing=
    for op in $op_names; do
        while read -r variant; do
            [ "$variant" != hopper_over_ranks ] || continue # test_groups
            grep -qE "^$op +$variant +served [1-9]" "$logs/$1-$op.log" || missing+=" $op/$variant"
        done < <(sed -n 's/^CUDA(\([a-z0-9_]*\),.*/\1/p' "$root/src/ops/$op/variants.inc")
    done
    if [ -n "$missing" ]; then
        echo "$1 did not visit$missing"
        return 1
    fi
    echo "$1 visited every variant"
}

# Rafter's columns of a quick table of every op and the first cells of the map are correct, and
# `native` really accumulates natively: it takes far less memory than fast.
bench() {
    local out=$logs/bench rafter=$build/bench/rafter
    mkdir -p "$out"
    if "$rafter" info | grep '^CUDA *not usable'; then
        return 77
    fi
    "$rafter" bench --device cuda --x 2048 --seconds 0.001 --providers rafter,fast,compact,native,mask,sp,bp,parallel,recurrence \
        --csv "$out" || return
    "$rafter" bench linear_cross_entropy --device cuda --preset seeds --table batch12288 --x 131072 --metric memory \
        --providers fast,native --csv "$out" || return
    "$rafter" bench --device cuda --preset map --cells 8 --seconds 0.001 --csv "$out" || return
    if grep -l wrong "$out"/*.csv; then
        return 1
    fi
    awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i }
             NR == 2 { fast = $at["fast"]; native = $at["native"] }
             END { printf "fast %.0f MiB, native %.0f MiB\n", fast, native; exit !(native > 0 && native + 900 < fast) }' \
        "$out/lce-memory-fwd+bwd-batch12288-dim4096-bf16.csv"
}
export -f bench served visited
export logs build root op_names="${ops[*]}"

for step in $steps; do
    case $step in
    walk)
        for op in "${ops[@]}"; do walk "$op"; done
        if [ "$sample" = 1 ]; then
            wait
            grep -q '^0 ' "$logs"/walk-*.end && job variants-served 10 bash -c served
        fi
        ;;
    api)
        for part in $("$api" --list); do
            # captures makes a context for every problem: one in 11 takes a minute
            job "api-$part" 300 "$api" --every $([ "$part" = captures ] && echo 11 || echo 1) "$part"
        done
        job failures 300 "$build/tests/test_cuda_failures"
        job fuzz 300 "$build/tests/test_fuzz" "${CALLS:-20000}" 1 cuda
        ;;
    large)
        wait # they need most of the host's memory
        for op in "${ops[@]}"; do
            OMP_NUM_THREADS=$processors job "large-$op" 200 "$walk" "$op" --large --device cuda
            wait
        done
        ;;
    bench)
        wait # it measures
        job bench 100 bash -c bench
        wait
        ;;
    memcheck | racecheck | initcheck | synccheck) sanitize "$step" ;;
    *)
        echo "tests/cuda.sh: there is no step '$step'" >&2
        exit 2
        ;;
    esac
done
wait

result=77
for end in "$logs"/*.end; do
    read -r status seconds <"$end"
    log=${end%.end}.log
    case $status in
    0) verdict="good: $(tail -n 1 "$log")" ;;
    77) verdict=$(tail -n 1 "$log") ;;
    *) verdict="FAILED with $status" ;;
    esac
    printf '%-34s %4d s  %s\n' "$(basename "${end%.end}")" "$seconds" "$verdict"
    if [ "$status" != 0 ] && [ "$status" != 77 ]; then
        result=1
        tail -n "${TAIL:-12}" "$log" | cut -c 1-300 | sed 's/^/    /'
    elif [ "$status" = 0 ] && [ $result = 77 ]; then
        result=0
    fi
done
exit $result
