#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# progress.sh FILE STEPS COMMAND...: runs a compiler, then says on the terminal, if there is one, how many of the steps are
# done: pip hides what a build prints. FILE has a line for each.
file=$1 steps=$2
shift 2
"$@" || exit
echo >>"$file"
(printf '\r\033[KRafter: %d of about %d files compiled ' "$(wc -l <"$file")" "$steps" >/dev/tty) 2>/dev/null
exit 0
