#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# promises.sh ROOT: every line of the table in docs/reliability.md names a test; every test that it
# names exists and is run; and every variable that names a library is read with secure_getenv.
set -euo pipefail
cd "$1"
failed=0
wrong() {
    echo "$1" >&2
    failed=1
}

# is_run PATH: whether a CMakeLists.txt adds the file, by name or by a pattern of its folder; or a file of
# the folder, if it is one. pytest finds the tests in Python by their names.
is_run() {
    local folder name
    [[ $1 == tests/python/test_*.py ]] && return
    folder=$(basename "$(dirname "$1")") name=$(basename "$1")
    [ -d "$1" ] && folder=$(basename "$1") name=main.c
    grep -qF -e "$folder/$name" -e "$folder/*.c" tests/CMakeLists.txt bench/CMakeLists.txt ||
        { [ "$folder" = tests ] && grep -qE "[ /]$name[ )]" tests/CMakeLists.txt bench/CMakeLists.txt; }
}

lines=0
while IFS='|' read -r _ promise _ _ held _; do
    [ -n "${promise// /}" ] && [[ $promise != *---* ]] || continue
    lines=$((lines + 1))
    mapfile -t names < <(grep -o '`[^`]*`' <<<"$held" | tr -d '`')
    [ ${#names[@]} -gt 0 ] || wrong "the line of$promise names no test"
    for name in "${names[@]}"; do
        case $name in
        './run test '*) grep -qE "^\./run test ${name#./run test }( |$)" <(./run help) || wrong "there is no $name" ;;
        */*)
            [ -e "$name" ] || wrong "$name, named for$promise, is not there"
            is_run "$name" || wrong "$name, named for$promise, is in no CMakeLists.txt"
            ;;
        *) grep -qE "X\($name\)" tests/host/host.h || wrong "test_host has no $name, which is named for$promise" ;;
        esac
    done
done < <(sed -n '/^| *| on a CPU/,/^$/p' docs/reliability.md | tail -n +2)
[ "$lines" -ge 15 ] || wrong "the table of promises was not found: $lines lines"

# What names a library decides which code runs; setuid programs must not listen.
if grep -rnE '\bgetenv\("RAFTER_[A-Z]*LIBRARY"' src python/src; then
    wrong "a library is named by getenv, wanted secure_getenv"
fi
exit $failed
