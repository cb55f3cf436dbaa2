#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install.sh SOURCE BUILD: installs into a temporary prefix, then compiles and runs, with only cc
# and pkg-config, every program in examples/ and every ```c block with a main() in README.md and
# docs/, and a project that uses the CMake package; configures one that contains the source tree; and
# runs the installed command.
set -euo pipefail
source_dir=$1 build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build_dir" --prefix "$work/prefix" >/dev/null
pc=$(find "$work/prefix" -name rafter.pc -printf '%h\n')
export PKG_CONFIG_PATH=$pc
libdir=$(pkg-config --variable=libdir rafter)
export LD_LIBRARY_PATH=$libdir

# Programs in the documentation: each ```c block that has a main becomes NAME-1.c, NAME-2.c, ...
for page in "$source_dir"/README.md "$source_dir"/docs/*.md; do
    awk -v base="$work/$(basename "$page" .md)" '
        /^```c$/ { inside = 1; text = ""; next }
        /^```$/ && inside { inside = 0; if (text ~ /int main\(/) { file = base "-" ++n ".c"; printf "%s", text > file; close(file) } next }
        inside { text = text $0 "\n" }' "$page"
done
cp "$source_dir"/examples/*.c "$work"

count=0
for program in "$work"/*.c; do
    name=$(basename "$program" .c)
    if grep -q 'rafter/mpi.h' "$program"; then
        command -v mpicc >/dev/null && command -v mpirun >/dev/null || continue
        # shellcheck disable=SC2046
        mpicc -std=c11 -Wall -Wextra -Werror "$program" -o "$work/$name" $(pkg-config --cflags --libs rafter) -lm
        for ranks in 1 3; do
            OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
                PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_btl_vader_single_copy_mechanism=none \
                mpirun -n $ranks "$work/$name" >"$work/$name.$ranks" || { echo "$name failed on $ranks ranks"; exit 1; }
        done
        # The loss does not depend on the number of ranks.
        diff <(grep -o 'loss [0-9.]*' "$work/$name.1") <(grep -o 'loss [0-9.]*' "$work/$name.3")
        count=$((count + 1))
        continue
    fi
    # shellcheck disable=SC2046
    ${CC:-cc} -std=c11 -Wall -Wextra -Werror "$program" -o "$work/$name" $(pkg-config --cflags --libs rafter) -lm
    "$work/$name" >"$work/$name.out" || { echo "$name failed:"; cat "$work/$name.out"; exit 1; }
    count=$((count + 1))
done
[ "$count" -gt 0 ] || { echo "no program was found"; exit 1; }

# The same through C++ (the header must compile there) and through CMake's package, shared and
# static.
if command -v c++ >/dev/null; then
    echo '#include <rafter/rafter.h>
int main() { return rafter_version() == nullptr; }' >"$work/header.cpp"
    # shellcheck disable=SC2046
    c++ -std=c++11 -Wall -Wextra -Werror "$work/header.cpp" -o "$work/header" $(pkg-config --cflags --libs rafter)
    "$work/header"
fi
mkdir "$work/consumer"
cp "$source_dir/examples/cross_entropy.c" "$work/consumer/main.c"
cat >"$work/consumer/CMakeLists.txt" <<'EOF'
cmake_minimum_required(VERSION 3.22)
project(consumer C)
find_package(rafter REQUIRED)
foreach(library rafter rafter_static)
  add_executable(with_${library} main.c)
  target_link_libraries(with_${library} PRIVATE rafter::${library} m)
endforeach()
EOF
cmake -S "$work/consumer" -B "$work/consumer/build" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/consumer/build" >/dev/null
"$work/consumer/build/with_rafter" >/dev/null
"$work/consumer/build/with_rafter_static" >/dev/null

# The command, where it was built, with its manual and the script that runs PyTorch's columns.
if [ -e "$build_dir/bench/rafter" ]; then
    "$work/prefix/bin/rafter" --version >/dev/null
    "$work/prefix/bin/rafter" bench act --list >/dev/null
    printf '#!/bin/sh\necho "script is $(readlink -f "$1")" >&2\nexit 3\n' >"$work/python"
    chmod +x "$work/python"
    RAFTER_PYTHON=$work/python "$work/prefix/bin/rafter" bench act --x 64 --mode fwd --seconds 0.001 >"$work/bench.out" 2>&1
    grep -qE "script is $work/prefix/.*/worker.py" "$work/bench.out" ||
        { echo "the installed command does not use the installed worker:"; cat "$work/bench.out"; exit 1; }
    man=$(find "$work/prefix" -path '*/man1/rafter.1')
    [ -n "$man" ] || { echo "the man page is not installed"; exit 1; }
    # Every verb of the help is in the manual.
    for verb in $("$work/prefix/bin/rafter" help | awk '/^rafter [a-z]/ { print $2 }' | sort -u); do
        grep -qw -- "$verb" "$man" || { echo "rafter.1 does not speak of '$verb'"; exit 1; }
    done
fi

# A project that contains Rafter's source gets the library by the package's names, and neither its tests nor its
# command. Configuring shows that; a build would take minutes.
mkdir "$work/parent"
cp "$work/consumer/main.c" "$work/parent/main.c"
cat >"$work/parent/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.22)
project(parent C)
add_subdirectory("$source_dir" rafter)
foreach(library rafter rafter_static)
  add_executable(with_\${library} main.c)
  target_link_libraries(with_\${library} PRIVATE rafter::\${library} m)
endforeach()
foreach(target test_walk rafter_command rafter_torch rafter_array)
  if(TARGET \${target})
    message(FATAL_ERROR "a project that contains Rafter builds \${target}")
  endif()
endforeach()
if(NOT "\${CMAKE_BUILD_TYPE}" STREQUAL "")
  message(FATAL_ERROR "Rafter changed the build type to \${CMAKE_BUILD_TYPE}")
endif()
EOF
cmake -S "$work/parent" -B "$work/parent/build" -DRAFTER_CUDA=OFF >"$work/parent.log" 2>&1 ||
    { cat "$work/parent.log"; exit 1; }
echo "$count programs compiled and ran; the CMake package and add_subdirectory work"
