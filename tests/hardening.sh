#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# hardening.sh FILE...: fails if the RUNPATH of a file has an empty or relative part, which makes the loader search the
# current folder, if the file is not bound at load time (-z now), or if its stack may be executed.
set -eu
export LC_ALL=C
failed=0
wrong() {
    echo "$1" >&2
    failed=1
}
for file; do
    dynamic=$(readelf -dW "$file")
    path=$(printf '%s\n' "$dynamic" | sed -n 's/.*(R\(UN\)*PATH).*\[\(.*\)\]/\2/p')
    case ":$path:" in
    ::) ;; # it has none
    *::* | *:[!/\$]*) wrong "$file has RUNPATH '$path', wanted absolute parts or \$ORIGIN" ;;
    esac
    case $dynamic in
    *NOW*) ;;
    *) wrong "$file is not linked with -z now" ;;
    esac
    case $(readelf -lW "$file" | grep GNU_STACK) in
    *RWE*) wrong "$file wants an executable stack" ;;
    esac
done
exit $failed
