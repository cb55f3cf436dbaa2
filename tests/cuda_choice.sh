#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cuda_choice.sh SOURCE: what cmake/gpu.cmake decides to build, with an nvidia-smi that answers as
# told.
set -euo pipefail
source_dir=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/choose.cmake" <<END
cmake_minimum_required(VERSION 3.22)
include("$source_dir/cmake/gpu.cmake")
rafter_choose_cuda(build architectures why)
message("\${build} [\${architectures}] \${why}")
END
cat >"$work/nvidia-smi" <<'END'
#!/bin/sh
[ -n "$GPUS" ] || exit 9
printf "$GPUS"
END
chmod +x "$work/nvidia-smi"

# expect PATTERN GPUS ARGUMENTS...: what is chosen matches.
expect() {
    local pattern=$1 gpus=$2 answer
    shift 2
    answer=$(GPUS=$gpus PATH="$work:$PATH" cmake "$@" -P "$work/choose.cmake" 2>&1 | tr '\n' ' ') || true
    grep -qE -- "$pattern" <<<"$answer" || { echo "GPUs '$gpus', $*: '$answer', wanted '$pattern'"; exit 1; }
}
nvcc=-DCMAKE_CUDA_COMPILER=/nvcc
auto=-DRAFTER_CUDA=AUTO
every='80-real;90a-real;100-real;120'

expect '^OFF \[\] .*no GPU here.*-DRAFTER_CUDA=ON' '' $auto $nvcc
expect '^OFF \[\] .*no GPU here' '7.5\n' $auto $nvcc # too old
expect '^ON \[90a-real\]' '9.0\n9.0\n' $auto $nvcc
expect '^ON \[80-real;120-real\]' '8.0\n12.0\n' $auto $nvcc
expect '^OFF \[\] .*nvcc was not found' '9.0\n' $auto
expect '^OFF \[\]' '9.0\n' -DRAFTER_CUDA=OFF $nvcc
expect "^ON \[$every\]" '' -DRAFTER_CUDA=ON $nvcc
expect "^ON \[$every\]" '9.0\n' -DRAFTER_CUDA=ON $nvcc
expect "^ON \[$every\]" '9.0\n' $auto -DRAFTER_CUDA_ARCHITECTURES=all $nvcc
expect '^ON \[90a-real\]' '' $auto -DRAFTER_CUDA_ARCHITECTURES=90a-real $nvcc # as CI does
expect '^OFF \[\]' '' $auto -DRAFTER_CUDA_ARCHITECTURES=90a-real # and where it has no nvcc
expect '^ON \[86-real\]' '8.6\n' -DRAFTER_CUDA=ON -DRAFTER_CUDA_ARCHITECTURES=native $nvcc
expect 'no CUDA compiler was found' '9.0\n' -DRAFTER_CUDA=ON
expect 'shows no GPU' '' $auto -DRAFTER_CUDA_ARCHITECTURES=native $nvcc
echo "what is built for CUDA is right"
