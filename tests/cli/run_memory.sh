#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn run --mem-limit: the smallest W that fits, the same W each time, and a peak that keeps the limit.
. "$(dirname "$0")/tap.inc"
needs_python
if has_sanitizer; then
    echo "1..0 # skipped: a program with sanitizers has memory of its own"
    exit 77
fi

field() { # FILE KEY.KEY: a value of a JSON document
    python3 -c 'import functools, json, sys
print(functools.reduce(lambda d, k: d[k], sys.argv[2].split("."), json.load(open(sys.argv[1]))))' "$1" "$2"
}

set -- --random heads=4,tokens=12000,dim=64 --seed 2
exits 0 "without a limit" run "$@" --dry-run --format json
program_bytes=$(field "$out" memory.program_bytes)
check "without a limit one worker is enough" test "$(field "$out" workers)" -eq 1
# 12000 tokens x 4 heads x 64 x 4 bytes = 12.3 MB for each of q, k, v, o
exits 0 "--save-inputs" run "$@" --save-inputs "$work/in" --dry-run
exits 0 "without a limit, from files" run "$@" --save-inputs "$work/in" --out "$work/all.npy"
set -- --q "$work/in-q.npy" --k "$work/in-k.npy" --v "$work/in-v.npy"
before=
for room in 24 20 8 5; do
    limit=$((program_bytes + (room << 20)))
    exits 0 "$room MiB for the work" run "$@" --out "$work/o.npy" --mem-limit $limit --format json --verify-rows 2
    cp "$out" "$work/$room.json"
    check "$room MiB: the peak keeps the limit" test "$(field "$out" memory.kept)" = True
    check "$room MiB: the prediction keeps the limit" \
        test "$(field "$out" memory.predicted_peak_bytes)" -le $limit
    check "$room MiB: no warning" test ! -s "$err"
    workers=$(field "$out" workers)
    echo "# $room MiB: W = $workers, measured $(field "$out" memory.measured_peak_bytes) bytes of $limit"
    exits 0 "$room MiB again" run "$@" --out "$work/again.npy" --mem-limit $limit --dry-run --format json
    check "$room MiB: the same W each time" test "$(field "$out" workers)" -eq "$workers"
    if [ -n "$before" ]; then
        check "$room MiB: not fewer workers than with more memory" test "$workers" -ge "$before" -o \
            "$(field "$work/$room.json" summary.spooled)" = True
    fi
    before=$workers
    # with one worker less it does not fit, or only through a spool
    if [ "$workers" -gt 1 ]; then
        spooled=$(field "$work/$room.json" summary.spooled)
        "$program" run "$@" --mem-limit $limit --workers $((workers - 1)) --dry-run --format json >"$out" 2>"$err"
        status=$?
        check "$room MiB: W is the smallest" \
            test "$status" -eq 2 -o "$spooled$(field "$out" summary.spooled 2>"$err")" = FalseTrue
    fi
done
check "the least memory needs a spool of its own" test "$(field "$work/5.json" summary.spooled)" = True
check "which is removed" test -z "$(find "$work" -name '.attn-spool*')"
exits 2 "more workers than the limit allows" run "$@" --mem-limit $((program_bytes + 100000)) --dry-run
tells 'no number of workers fits' "the message"
exits 2 "W = 1 under a small limit" run "$@" --mem-limit $((program_bytes + (5 << 20))) --workers 1 --dry-run
tells 'W = 1 needs' "the message names W"
finish
