#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The rafter command: exit statuses, messages, titles, files. command.sh RAFTER TEST_BENCH, where
# the second is the command with misbehaving providers (bad_providers.c).
set -uo pipefail
rafter=$(realpath "$1")
bad=$(realpath "$2")
tests=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
folder=$(mktemp -d)
export RAFTER_PYTHON=${RAFTER_PYTHON:-/nonexistent/python3} # no PyTorch, unless the caller says where
trap 'rm -rf "$folder"' EXIT
failures=0
quick=(bench logsumexp --x 64 --mode fwd --seconds 0.001 --providers rafter)

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# expect STATUS PATTERN ARGUMENTS...: the command ends with the status and prints the pattern
# somewhere.
expect() {
    local status=$1 pattern=$2
    shift 2
    "$@" >"$folder/out" 2>&1
    local got=$?
    [ "$got" = "$status" ] || fail "$(basename "$1") ${*:2}: status $got, wanted $status"
    grep -qE -- "$pattern" "$folder/out" || fail "$(basename "$1") ${*:2}: nothing in its output matches '$pattern'"
}

# --- verbs and wrong command lines
expect 0 '^rafter [0-9]+\.[0-9]+\.[0-9]+$' "$rafter" --version
expect 0 'rafter bench' "$rafter" help
expect 2 'rafter bench' "$rafter"
expect 2 "no verb 'dance'" "$rafter" dance
expect 0 '^act +cpu +portable +yes$' "$rafter" info
grep -qE '^linear_cross_entropy +cuda +[a-z0-9_]+ +sm[0-9a]+ +(yes|no: )' "$folder/out" || fail "info lists no CUDA variants"
expect 0 '^logsumexp +cpu +portable +yes$' "$rafter" info logsumexp
grep -q '^act ' "$folder/out" && fail "info OP lists other ops"
expect 2 "no op 'now'" "$rafter" info now
expect 2 "wants --shape" "$rafter" info act --dim 1
expect 2 "--shape wants one op" "$rafter" info --shape 2x3
expect 2 "--shape is '2x'" "$rafter" info act --shape 2x
expect 2 "wanted a dim of the shape" "$rafter" info act --shape 2x3 --act softmax --dim 2
expect 2 "wanted the number of classes" "$rafter" info lce --shape 2x3
expect 2 "has no algorithm 'fast'" "$rafter" info act --shape 2x3 --algorithm fast
expect 2 "no option '--shape'" "$rafter" bench --shape 2x3

# --- over ranks
expect 2 "--ranks is '0'" "$rafter" scale --ranks 0
expect 2 "--network is 'string'" "$rafter" scale --network string
expect 2 "--device is 'cpu', wanted cuda, with --beside" "$rafter" scale --beside 8
expect 2 "no option '--shape'" "$rafter" scale --shape 2x3
expect 1 "cannot write $folder/none/a.svg" "$rafter" scale --rows 8 --depth 8 --classes 60 --ranks 1 --seconds 0.001 --svg "$folder/none/a.svg"
expect 0 'network modelled: custom, 7.0 us per hop, 3000 GB/s' "$rafter" scale --rows 8 --depth 8 --classes 60 --ranks 1,4 --seconds 0.001 \
    --latency 7 --bandwidth 3000 --svg "$folder/a.svg"
grep -qE '^    4 .* 0\.0140 ' "$folder/out" || fail "scale does not count two hops for 4 ranks"
grep -q '<polyline' "$folder/a.svg" || fail "scale --svg draws no line"

# --- which variant a call takes, and why the ones before it were passed over
expect 0 '^    portable +runs, with 0 bytes of workspace$' env RAFTER_VARIANT=portable "$rafter" info act --shape 32768x4096 --act softmax
case $(uname -m) in x86_64) above=avx2 ;; aarch64) above=neon ;; *) above=portable ;; esac
[ "$above" = portable ] || grep -qE "^    $above +passed over: " "$folder/out" || fail "info OP does not say why $above was passed over"
grep -qE '^act softmax bf16 \[32768, 4096\] dim -1, on cpu$' "$folder/out" || fail "info OP does not describe the call"
[ "$(grep -cE '^(fwd|bwd)$' "$folder/out")" = 2 ] || fail "info OP does not list forward and backward"
expect 0 '^bwd$' "$rafter" info logsumexp --shape 4x1024x65536 --direction backward --dtype fp16
grep -q '^fwd' "$folder/out" && fail "info OP --direction backward lists forward"
expect 0 '^fwd\+bwd$' "$rafter" info lce --shape 4096x2048 --classes 128256 --bias --reduction sum --label-smoothing 0.1
expect 0 ' bytes of workspace$' "$rafter" info cross_entropy --shape 4096x32000 --in-place --extras --class-weight
expect 0 ' bytes of workspace$' "$rafter" info lrpe_cosine --shape 12x4096x12x128 --act softmax --softmax-over sequence --extras
expect 0 ' 0 bytes of workspace$' "$rafter" info scale --shape 4096x32000 --in-place
grep -q '^bwd' "$folder/out" && fail "info scale lists a backward"
expect 0 'there is nothing to compute' "$rafter" info act --shape 0x4096 --act silu
expect 2 "no op 'acts', wanted cross_entropy, .* or scale" "$rafter" bench acts
expect 2 "no op 'acts'" "$rafter" check acts
expect 0 'good$' "$rafter" check scale # all ops: the test `check`, beside others
expect 2 "no option '--fast'" "$rafter" bench --fast
expect 2 "no option '--json'" "$rafter" check --json x
expect 2 "--preset is 'slow', wanted quick, seeds, models or map" "$rafter" bench --preset slow
expect 2 "--metric is 'area', wanted speed, memory or all" "$rafter" bench --metric area
expect 2 "--mode is 'up', wanted fwd, bwd or fwd\+bwd" "$rafter" bench --mode=up
expect 2 "--dtype is 'fp8'" "$rafter" bench --dtype fp8
expect 2 "--x is '12,'" "$rafter" bench --x 12,
expect 2 "--x is '0'" "$rafter" bench --x 0
expect 2 "--threads is '-1'" "$rafter" bench --threads -1
expect 2 "--threads wants a value" "$rafter" bench --threads
expect 2 "--seconds is 'soon'" "$rafter" bench --seconds soon
expect 2 "--limit is 'never'" "$rafter" bench --limit never
expect 2 "--resume wants --json" "$rafter" bench --resume
expect 2 "compare wants two reports" "$rafter" compare one.json
expect 2 "headline wants one report" "$rafter" headline
expect 2 "page wants one report" "$rafter" page
expect 2 "$folder/none.json: No such file" "$rafter" compare "$folder/none.json" "$folder/none.json"
expect 2 "--percent takes no value" "$rafter" bench --percent=yes
expect 2 "names 'nobody'" "$rafter" bench --providers rafter,nobody
expect 1 "$folder/no/such/file" "$rafter" bench act --json "$folder/no/such/file"
[ -e "$folder/no" ] && fail "a file was made where there should be none"

# --- output files: wrong ones are refused before anything is measured; links are followed; devices and pipes stay what they are
mkdir "$folder/outputs"
cd "$folder/outputs" || exit 1
mkdir folder
touch file
for option in "--json folder" "--html folder" "--csv file"; do
    # shellcheck disable=SC2086
    expect 1 "^rafter: ${option#* }: (Is|Not) a directory" "$rafter" "${quick[@]}" $option
    grep -q logsumexp-speed "$folder/out" && fail "bench $option measures before it fails"
done
ln -s folder/target.json link.json
expect 0 logsumexp "$rafter" "${quick[@]}" --json link.json # the target is made,
expect 0 logsumexp "$rafter" "${quick[@]}" --json link.json # then replaced
[ -L link.json ] && [ -f folder/target.json ] || fail "--json replaces a symbolic link"
ln -s loop.json loop.json
expect 1 'loop.json: Too many levels' "$rafter" "${quick[@]}" --json loop.json
# a name that the temporary file could have, as a link to a file of somebody else
for name in out.json.PID out.json.PID-0; do
    echo precious >victim
    bash -c 'ln -s victim "${1/PID/$$}"; shift; exec "$@"' - $name "$rafter" "${quick[@]}" --json out.json >/dev/null
    [ "$(cat victim)" = precious ] && [ -f out.json ] && [ ! -L out.json ] || fail "the temporary file follows the link $name"
    rm -f out.json*
done
chmod 640 folder/target.json
"$rafter" "${quick[@]}" --json folder/target.json >/dev/null
[ "$(stat -c %a folder/target.json)" = 640 ] || fail "--json changes the mode of the file"
if [ "$(id -u)" != 0 ]; then
    chmod 400 folder/target.json
    expect 1 'target.json: Permission denied' "$rafter" "${quick[@]}" --json folder/target.json
elif mknod null c 1 3 2>/dev/null && (: >null) 2>/dev/null; then # as root a rename would replace the node
    expect 0 logsumexp "$rafter" "${quick[@]}" --json null --html null
    [ -c null ] || fail "--json replaces a device node"
    mknod full c 1 7
    expect 1 'full: No space left' "$rafter" "${quick[@]}" --json full
fi
"$rafter" "${quick[@]}" --json /dev/fd/3 3>&1 >/dev/null | grep -q '^  "interrupted": false' || fail "--json does not write to a pipe"
mkfifo pipe
timeout 20 cat pipe >piped.json &
timeout 20 "$rafter" "${quick[@]}" --json pipe >/dev/null || fail "--json PIPE: status $?"
wait $!
[ -p pipe ] && [ "$(grep -c '^{' piped.json)" = 1 ] || fail "--json does not write one report to a named pipe"
cd - >/dev/null || exit 1

# --- every table of the seeds: title, x, rows, and its columns in their order, possibly with others between them
"$rafter" bench --preset seeds --metric all --list >"$folder/list.txt" 2>&1 || fail "bench --list: status $?"
while read -r title x rows columns; do
    grep -qE "^${title//+/\\+} $x $rows .*${columns// / (.* )?}( |$)" "$folder/list.txt" ||
        fail "no table '$title' with x = $x, rows $rows and columns $columns"
done <"$tests/seeds.txt"
[ "$(wc -l <"$tests/seeds.txt")" = 50 ] || fail "there are 50 tables in the seeds"

# --- the preset of models: every size, and every option; dtype and rows can be chosen, so that it can be run in pieces
"$rafter" bench --preset models --list >"$folder/list.txt" 2>&1 || fail "bench --preset models --list: status $?"
[ "$(wc -l <"$folder/list.txt")" = 15 ] || fail "--preset models has $(wc -l <"$folder/list.txt") tables, wanted 15"
for size in 4096-vocab128256 2048-vocab151936 3584-vocab256000 5120-vocab151936 7168-vocab129280 768-vocab50257 2048-vocab50304 1024-vocab32000; do
    grep -qE "^lce-speed-fwd\+bwd-dim$size-bf16 b 64,256,1024,2048,4096,8192,16384,32768 rafter .*rafter_py.* liger_sm90 liger_fslce quack quack_exp" \
        "$folder/list.txt" || fail "--preset models has no table of $size"
done
for option in 3584-vocab256000-softcap30 4096-vocab128256-{label_smoothing0.1,class_weight,row_weight,z_loss0.0001,logit_scale0.5,bias}; do
    grep -qE "^lce-speed-fwd\+bwd-dim$option-bf16 b 4096 rafter fast compact native rafter_py " "$folder/list.txt" ||
        fail "--preset models has no table of $option, or columns that lack the option"
done
expect 0 '^lce-speed-fwd\+bwd-dim768-vocab50257-fp16 b 64 rafter ' "$rafter" bench --preset models --list --x 64 --dtype fp16 --table vocab50257
expect 0 '^0 +8\.0 +[0-9.]+$' "$rafter" bench --preset models --x 8 --dtype fp32 --table vocab32000 --providers rafter --seconds 0.001
expect 1 'nothing to measure' "$rafter" bench act --preset models

# --- every Python column has its function
while IFS='"' read -r head ops _; do
    column=${head#*(}
    for op in ${ops//,/ }; do
        op=${op%:*} # act:softmax
        grep -qE "^(def )?${op}_${column%,*}( =|\\()" "$tests/../bench/worker/peers.py" || fail "peers.py has no ${op}_${column%,*}"
    done
done < <(grep -E '^RAFTER_(PEER|PACKAGE)\(' "$tests/../bench/peers.inc")

# --- the tables themselves (with small x and little time per cell, to be quick)
small=(--preset seeds --x 16 --seconds 0.001 --metric all --providers rafter)
timeout 60 "$rafter" bench cross_entropy logsumexp act lrpe_cosine "${small[@]}" --json "$folder/seeds.json" \
    >"$folder/seeds.txt" 2>"$folder/err" || fail "bench --preset seeds: status $?"
timeout 60 "$rafter" bench lce "${small[@]}" --table batch12288-dim4096 --json "$folder/lce.json" \
    >>"$folder/seeds.txt" 2>>"$folder/err" || fail "bench lce --preset seeds: status $?"
[ -s "$folder/err" ] && fail "bench prints to stderr though it is not a terminal: $(head -n 1 "$folder/err")"
while read -r title; do
    grep -qxF "$title:" "$folder/seeds.txt" || fail "no table '$title'"
    grep -qF "\"table\": \"$title\"" "$folder/seeds.json" "$folder/lce.json" || fail "no JSON row of '$title'"
done < <(cut -d ' ' -f 1 "$tests/seeds.txt")
grep -qE '^0 +16\.0 +[0-9.]+$' "$folder/seeds.txt" || fail "no row '0  16.0  time'"
grep -qw wrong "$folder/seeds.txt" && fail "a result is wrong: $(grep -w wrong "$folder/seeds.txt" | head -n 1)"

# --- the map: every op but linear cross entropy, in memory that all cells share; the worst cells by name
expect 0 '^The worst [0-9]+ cells of all maps$' "$rafter" bench --preset map --cells 3 --seconds 0.001 --json "$folder/map.json"
for map in cross_entropy-speed-{fwd,bwd}-map logsumexp-speed-{fwd,bwd}-map act-speed-{fwd,bwd}-map_{elementwise,softmax} \
    lrpe_cosine-speed-{fwd,bwd}-map scale-speed-fwd-map; do
    grep -qE "^$map-cpu-seed1: 3 cells, 3 measured, 0 wrong" "$folder/out" || fail "the map has no '$map' with 3 cells"
done
grep -qE '^ +[0-9.]+ % +-?[0-9.]+ +[0-9.]+ +[0-9.]+ +[a-z0-9]+ +act (fwd|bwd) softmax (bf16|fp16|fp32) \[' "$folder/out" ||
    fail "the map names no cell of softmax"
"$rafter" bench logsumexp --preset map --cells 4 --resume --seconds 0.001 --json "$folder/map.json" >"$folder/more.txt"
grep -qE '^logsumexp-speed-bwd-map-cpu-seed1: 4 cells, 4 measured' "$folder/more.txt" || fail "the map does not resume"
"$rafter" page "$folder/map.json" >"$folder/map.html"
grep -q 'class="tile h' "$folder/map.html" || fail "the page of a map has no heat map"
expect 0 '^[1-9][0-9]* cells compared' "$rafter" compare "$folder/map.json" "$folder/map.json"
expect 0 'seed7: 1 cells' "$rafter" bench scale --preset map --cells 1 --seed 7 --seconds 0.001
expect 0 ', 2 measured, 2 wrong,' "$bad" bench logsumexp --preset map --cells 2 --mode fwd --providers rafter,askew --seconds 0.001
grep -q 'askew at cell 1: wrong: lse\[0\] is 12' "$folder/out" || fail "the map does not say what is wrong"
expect 2 'linear_cross_entropy has no map' "$rafter" bench lce --preset map
expect 2 'takes no --x, --dtype' "$rafter" bench --preset map --dtype fp32
expect 2 'belong to --preset map' "$rafter" bench --cells 3

# --- JSON and CSV of a table with all providers; the share of the roofline
expect 0 '^ +n +rafter +% .*naive +%' "$rafter" bench act --x 64,128 --mode fwd --seconds 0.001 --percent \
    --json "$folder/act.json" --csv "$folder/csv" --threads 2
[ "$(find "$folder/csv" -name 'act-speed-fwd-*.csv' | wc -l)" -ge 6 ] || fail "too few files under --csv"
head -qn 1 "$folder"/csv/*act_silu*.csv | grep -qE '^n,rafter,.*naive' || fail "the CSV has no heading"
if command -v python3 >/dev/null; then
    python3 - "$folder/act.json" <<'PYTHON' || fail "the JSON is not as it should be"
import json, sys
report = json.load(open(sys.argv[1]))
assert report["threads"] == 2 and report["cpu"] and report["version"] and report["command"][1] == "bench"
fields = {"table", "x", "provider", "metric", "median", "p10", "p90", "unit", "bytes", "flops", "max_error"}
assert len(report["rows"]) > 0
for row in report["rows"]:
    assert fields <= set(row), row
    assert row["unit"] == "ms" and row["metric"] == "speed" and row["x"] in (64, 128)
    if row["median"] is not None:
        assert 0 < row["p10"] <= row["median"] <= row["p90"], row
assert {"rafter", "naive"} <= {row["provider"] for row in report["rows"]}
for row in report["rows"]:
    runs = row["provider"] in ("rafter", "mask") and "act_none" not in row["table"]  # none in place runs no kernel
    assert ("variant" in row) == runs, row
PYTHON
fi
expect 0 '^act-memory-fwd-' "$rafter" bench act --x 64 --mode fwd --metric memory

# --- columns of single variants
variants=(bench logsumexp --x 64 --mode fwd --seconds 0.001)
expect 0 '^ +n +rafter +.*portable' "$rafter" "${variants[@]}" --variants --without naive
expect 0 '^ +n +rafter +portable$' "$rafter" "${variants[@]}" --providers rafter,portable --json "$folder/variants.json"
if command -v python3 >/dev/null; then
    python3 - "$folder/variants.json" <<'PYTHON' || fail "the JSON does not name the variants"
import json, sys
report = json.load(open(sys.argv[1]))
assert report["tables"][0]["ours"] == ["rafter", "portable"]
assert [row["variant"] for row in report["rows"] if row["provider"] == "portable"] == ["portable"]
PYTHON
fi

# The slowest level beside the choice: some cell of the map is measured with both.
"$rafter" bench logsumexp --preset map --cells 2 --seconds 0.001 --variants --providers rafter --json "$folder/map_variants.json" \
    >"$folder/out" 2>&1 || fail "the map with --variants failed"
grep -q '"provider": "portable"' "$folder/map_variants.json" || fail "the map has no columns of variants"

expect 0 '^ +n +rafter +error +host us +first ms$' "$rafter" bench act --x 64 --mode fwd --table silu --providers rafter --error --host \
    --first-call --seconds 0.001
grep -qE '^0 +64\.0 +[0-9.]+ +[0-9.e-]+ +[0-9.]+ +[0-9.]+$' "$folder/out" || fail "a figure beside the time is missing"
expect 0 '^\| 64\.0 \| [0-9.]+ \|$' "$rafter" bench act --x 64 --mode fwd --table silu --providers rafter --seconds 0.001 --markdown

# --- Ctrl-C and SIGTERM: the exit status of an interrupt, and whole files that say so; SIGKILL: the last file does not claim to be complete
for signal in INT TERM KILL; do
    "$rafter" bench act --x 256 --seconds 0.5 --mode fwd --providers rafter --json "$folder/cut.json" >"$folder/cut.txt" 2>&1 &
    pid=$!
    for ((i = 0; i < 200; i++)); do
        [ -s "$folder/cut.json" ] && break
        sleep 0.05
    done
    kill -$signal $pid
    wait $pid 2>/dev/null
    status=$?
    wanted=$((128 + $(kill -l $signal)))
    [ $status = $wanted ] || fail "a bench that gets SIG$signal ends with status $status, wanted $wanted"
    grep -q '"interrupted": true' "$folder/cut.json" || fail "the report of a bench that gets SIG$signal says that it is complete"
    if command -v python3 >/dev/null; then
        python3 -c 'import json, sys; json.load(open(sys.argv[1]))["rows"]' "$folder/cut.json" || fail "SIG$signal leaves bad JSON"
    fi
    [ $signal = KILL ] || [ -z "$(find "$folder" -name '*.json.*')" ] || fail "SIG$signal leaves a temporary file behind"
    rm -f "$folder"/cut.json*
done

# --- providers that misbehave lose only their own cells
naughty=rafter,parallel,recurrence,spoiled,crashing,dying,refusing,apart,hanging
timeout 60 "$bad" bench logsumexp --x 64 --mode fwd --seconds 0.001 --providers $naughty >"$folder/bad.txt" 2>&1 || fail "bad providers: status $?"
grep -qE '^ +n +rafter .*spoiled +crashing +dying +refusing +apart +hanging$' "$folder/bad.txt" || fail "bad providers: no such columns"
grep -qE '^0 +64\.0 +[0-9.]+ .* wrong +- +- +- +[0-9.]+ +-$' "$folder/bad.txt" || fail "bad providers: no such row"
grep -qE 'spoiled at n = 64: lse\[0\] is 12' "$folder/bad.txt" || fail "bad providers: nothing said of the wrong element"
grep -qE 'crashing at n = 64: died of signal 4' "$folder/bad.txt" || fail "bad providers: nothing said of the crash"
grep -qE 'dying at n = 64: died of signal 9' "$folder/bad.txt" || fail "bad providers: nothing said of the death"
grep -qE 'refusing at n = 64: not today' "$folder/bad.txt" || fail "bad providers: nothing said of the refusal"
grep -qE 'hanging at n = 64: took longer than 0.5 s' "$folder/bad.txt" || fail "bad providers: nothing said of the hang"

expect 0 'closing at n = 64: closed its connection, but did not end, and was killed' timeout 20 "$bad" bench logsumexp --x 64 --mode fwd \
    --seconds 0.001 --providers rafter,closing --limit 1

# --- a gradient that is correct only at the labels is wrong
expect 0 '^0 +32768\.0 +[0-9.]+ +wrong$' "$bad" bench cross_entropy --x 32768 --mode bwd --seconds 0.001 --providers rafter,flat
grep -qE 'flat at v = 32768: dlogits\[[0-9]+\] is ' "$folder/out" || fail "flat gradients: nothing said of the wrong element"

# --- the same for Python columns that misbehave, and for a missing worker
expect 0 '^  .*to, toc: .*/nonexistent/python3 cannot be run' env RAFTER_PYTHON=/nonexistent/python3 \
    "$rafter" bench logsumexp --x 64 --mode fwd --seconds 0.001
grep -qE '^0 +64\.0 .* - +- +- +-$' "$folder/out" || fail "missing Python columns are not dashes"
if command -v python3 >/dev/null; then
    expect 0 '^0 +64\.0 +[0-9.]+ .* - +- +wrong +1\.0$' env RAFTER_PYTHON=python3 RAFTER_WORKER="$tests/bad_worker.py" \
        "$rafter" bench logsumexp --x 64 --mode fwd --seconds 0.001 --limit 1
    cp "$folder/out" "$folder/worker.txt"
    grep -qE 'ptr at n = 64: the Python worker died of signal 6' "$folder/worker.txt" || fail "nothing said of the worker's death"
    grep -qE 'rtr at n = 64: took longer than 1 s' "$folder/worker.txt" || fail "nothing said of the worker's silence"
    grep -qE 'to at n = 64: lse\[[0-9]+\] is ' "$folder/worker.txt" || fail "nothing said of the worker's wrong answer"
fi

# --- a Python column that closes its socket and lives, and one that never ends its line
if command -v python3 >/dev/null; then
    bad_worker=(env RAFTER_PYTHON=python3 RAFTER_WORKER="$tests/bad_worker.py")
    expect 0 'rtr at n = 64: the Python worker closed its connection, but did not end, and was killed' "${bad_worker[@]}" RAFTER_TEST_RTR=close \
        timeout 20 "$rafter" bench logsumexp --x 64 --mode fwd --seconds 0.001 --providers rafter,rtr --limit 1
    expect 0 "rtr at n = 64: the Python worker's answer is longer than the limit of 1048576 bytes" "${bad_worker[@]}" RAFTER_TEST_RTR=talk \
        timeout 20 "$rafter" bench logsumexp --x 64 --mode fwd --seconds 0.001 --providers rafter,rtr --limit 10
    expect 0 "rtr at n = 64: the Python worker gave no time" "${bad_worker[@]}" RAFTER_TEST_RTR=exaggerate \
        timeout 20 "$rafter" bench logsumexp --x 64 --mode fwd --seconds 0.001 --providers rafter,rtr --limit 10
fi

# --- Ctrl-C does not wait for a Python column that hangs
if command -v python3 >/dev/null; then
    RAFTER_PYTHON=python3 RAFTER_WORKER="$tests/bad_worker.py" "$rafter" bench logsumexp --x 64 --mode fwd --seconds 0.001 --limit 50 \
        --providers rafter,rtr --json "$folder/hung.json" >"$folder/hung.txt" 2>&1 &
    pid=$!
    sleep 2
    kill -INT $pid
    before=$SECONDS
    wait $pid
    status=$?
    [ $status = 130 ] || fail "a bench interrupted while a column hangs ends with status $status, wanted 130"
    [ $((SECONDS - before)) -le 5 ] || fail "a bench interrupted while a column hangs takes $((SECONDS - before)) s to end"
fi

# --- compare: nothing is slower than itself; a millisecond more is reported
same=(bench logsumexp --x 64,128 --mode fwd --seconds 0.02 --providers rafter,sluggish)
"$bad" "${same[@]}" --json "$folder/old.json" >/dev/null || fail "bench for compare: status $?"
RAFTER_TEST_SLOW=1 "$bad" "${same[@]}" --json "$folder/new.json" >/dev/null || fail "slow bench for compare: status $?"
expect 0 '^[0-9]+ cells compared: 0 got worse' "$bad" compare "$folder/old.json" "$folder/old.json"
expect 1 'n=64 sluggish: .*: slower$' "$bad" compare "$folder/old.json" "$folder/new.json"
expect 1 'n=64 sluggish: .*: slower$' "$bad" compare --html "$folder/compare.html" "$folder/old.json" "$folder/new.json"
[ "$(grep -c '<svg' "$folder/compare.html")" = 2 ] || fail "compare --html does not draw the two runs side by side"
grep -q '<small>slower</small>' "$folder/compare.html" || fail "compare --html does not say what got slower"
expect 1 "$folder/no/such/file: No such file" "$bad" compare "$folder/old.json" "$folder/old.json" --html "$folder/no/such/file"
expect 2 'compare wants two reports' "$bad" compare "$folder/old.json" "$folder/old.json" --html

# --- the page says what disturbed the run, and what memory compares
if command -v python3 >/dev/null; then
    python3 - "$folder/old.json" "$folder/unrest.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
report["unrest"] = {"processors": report["threads"], "busy_by_others": 0.9, "slowdown": 1.5, "clock_low_mhz": 0, "clock_high_mhz": 0}
for table in report["tables"]:
    table.update(title="cross_entropy-memory-bwd-batch4096-bf16-ls0.0-mean", metric="memory", gradient_overwrites_input=["sluggish"])
for row, mebibytes in zip(report["rows"], (8.5, 0.25, 24.0, 0.5)): # gradients of 8 and 16 MiB, over the input in the second column
    row.update(table="cross_entropy-memory-bwd-batch4096-bf16-ls0.0-mean", metric="memory", unit="MiB", median=mebibytes,
               gradient_bytes=(8 if row["x"] == 64 else 16) << 20)
json.dump(report, open(sys.argv[2], "w"))
PYTHON
    expect 0 'Cross entropy, backward, 4096 rows, bf16: memory' "$bad" page "$folder/unrest.json"
    grep -q 'other programs kept 0.9 of ' "$folder/out" || fail "the page does not say that the machine was busy"
    grep -q 'clock moved: the same loop took up to 1.50 times' "$folder/out" || fail "the page does not say that the clock moved"
    grep -qE '<td>8 MiB</td><td>sluggish 0.5 MiB, in place</td><td class="bad">7.5 MiB more</td>' "$folder/out" ||
        fail "the summary does not compare workspace: $(grep -o '<td>v = .*' "$folder/out" | head -n 1)$(grep -o '<td>n = .*' "$folder/out" | head -n 1)"
fi

# --- headline: the largest row of the tables that README.md names, in plain words
"$bad" bench logsumexp --preset seeds --x 64,256 --mode fwd --seconds 0.001 --providers rafter --json "$folder/seeds.json" >/dev/null ||
    fail "bench for headline: status $?"
expect 0 '^\| logsumexp, 4096 rows of 256 \| \*\*' "$bad" headline "$folder/seeds.json"

# --- resume: existing rows are not measured again, the others are added
cp "$folder/old.json" "$folder/more.json"
expect 0 '^2 +256\.0 ' "$bad" bench logsumexp --x 64,128,256 --mode fwd --seconds 0.001 --providers rafter,sluggish --json "$folder/more.json" --resume
if command -v python3 >/dev/null; then
    python3 - "$folder/old.json" "$folder/more.json" <<'PYTHON' || fail "a resumed run does not keep what was there"
import json, sys
old, new = (json.load(open(path))["rows"] for path in sys.argv[1:])
assert [row for row in new if row["x"] != 256] == old
assert len([row for row in new if row["x"] == 256]) == len(old) // 2
PYTHON
fi
expect 0 '^0 +32\.0 ' "$bad" bench logsumexp --x 32 --mode fwd --seconds 0.001 --providers rafter --json "$folder/more.json" --resume
expect 0 '<h2 id="logsumexp-speed-fwd-batch1-dim1024-bf16">' "$bad" page "$folder/more.json"

# --- a full disk: every verb that prints fails
if [ -c /dev/full ]; then
    for verb in help --version info "info act --shape 2x3" "compare $folder/old.json $folder/old.json" "headline $folder/seeds.json" \
        "page $folder/old.json" "bench act --list"; do
        # shellcheck disable=SC2086
        "$rafter" $verb >/dev/full 2>"$folder/err" && fail "rafter ${verb%% *} succeeds on a full disk"
        grep -q 'cannot write to standard output' "$folder/err" || fail "rafter ${verb%% *} does not say that it cannot write"
    done
fi

# --- a resumed report names a table as a path: its CSV file stays in the folder, and has its own name
if command -v python3 >/dev/null; then
    for title in ../escape /escape .. a/b a%2Fb ''; do
        "$rafter" "${quick[@]}" --json "$folder/titled.json" >/dev/null
        python3 - "$folder/titled.json" "$title" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
for item in report["tables"]:
    item["title"] = sys.argv[2]
for item in report["rows"]:
    item["table"] = sys.argv[2]
json.dump(report, open(sys.argv[1], "w"))
PYTHON
        mkdir -p "$folder/titled"
        expect 0 logsumexp "$rafter" "${quick[@]}" --json "$folder/titled.json" --resume --csv "$folder/titled/csv"
    done
    [ -z "$(find "$folder/titled" "$folder"/*.csv -name '*.csv' -not -path '*/csv/*' 2>/dev/null)" ] || fail "--csv writes outside its folder"
    [ "$(find "$folder/titled/csv" -type f | wc -l)" = 7 ] || fail "--csv does not write one file per title"
fi

# --- pages of a report whose strings are HTML: no tag and no attribute comes from it; resumed, it is written as JSON again
if command -v python3 >/dev/null; then
    for report in old map; do
        python3 - "$folder/$report.json" "$folder/hostile.json" <<'PYTHON'
import json, sys
def spoil(value, key=""):
    if isinstance(value, dict):
        return {k: spoil(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [spoil(v, key) for v in value]
    keep = value == "rafter" or key in ("cpu", "metric")
    return value if keep or not isinstance(value, str) else "\"'><script>" + value
report = spoil(json.load(open(sys.argv[1])))
json.dump(dict(report, gpu="\"'><script>"), open(sys.argv[2] + ".page", "w"))
json.dump(report, open(sys.argv[2], "w"))
PYTHON
        expect 0 '<!doctype html>' "$rafter" page "$folder/hostile.json.page"
        python3 - "$folder/out" <<'PYTHON' || fail "the page of a hostile $report.json has its markup"
import html.parser, sys
class Page(html.parser.HTMLParser):
    scripts, names = 0, set()
    def handle_starttag(self, tag, attributes):
        self.scripts += tag == "script"
        self.names |= {name for name, _ in attributes}
text = open(sys.argv[1]).read()
page = Page()
page.feed(text)
assert text.count("<script") == page.scripts == 1, text.count("<script")
assert all(name.isascii() and name.replace("-", "").isalnum() for name in page.names), page.names
assert "&quot;&#39;&gt;&lt;script&gt;" in text
PYTHON
        expect 0 scale "$rafter" bench scale --preset map --cells 1 --seconds 0.001 --json "$folder/hostile.json" --resume
        python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$folder/hostile.json" || fail "a hostile $report.json is resumed as bad JSON"
    done
fi

# --- numbers of a report that fit no integer are cut, and infinities are no results
if command -v python3 >/dev/null; then
    for report in old map; do
        for number in 1e300 -1e300 1e999 -1e999 1e19 -1 0; do
            python3 - "$folder/$report.json" "$folder/hostile.json" $number <<'PYTHON'
import json, sys
def spoil(value, key=""):
    if isinstance(value, dict):
        return {k: spoil(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [spoil(v, key) for v in value]
    return "NUMBER" if isinstance(value, (int, float)) and not isinstance(value, bool) else value
text = json.dumps(spoil(json.load(open(sys.argv[1]))))
open(sys.argv[2], "w").write(text.replace('"NUMBER"', sys.argv[3]))
PYTHON
            expect 0 '<!doctype html>' "$rafter" page "$folder/hostile.json"
            unwanted='-9223372036854775808|-2147483648'
            [[ $number = *e999 ]] && unwanted+='|[^a-z](nan|inf)[^a-z]'
            ! grep -qE -- "$unwanted" "$folder/out" || fail "the page of $report.json with $number everywhere has $(
                grep -oEm1 -- ".{20}($unwanted)" "$folder/out" | head -n 1)"
            "$rafter" compare "$folder/hostile.json" "$folder/hostile.json" >/dev/null 2>&1
            [ $? -le 2 ] || fail "compare of $report.json with $number everywhere crashes"
        done
    done
    for number in nan -nan -inf infinity; do
        echo "{\"tables\": [], \"rows\": [], \"threads\": $number}" >"$folder/hostile.json"
        expect 2 'not a report' "$rafter" page "$folder/hostile.json"
    done
fi

if [ $failures -gt 0 ]; then
    cat "$folder/bad.txt"
    exit 1
fi
echo "the command works as expected"
