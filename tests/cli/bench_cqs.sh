#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn bench cqs: a row a case, right results, out of memory as a row, all formats.
. "$(dirname "$0")/tap.inc"
needs_python

set -- --tokens 500,801 --workers 1,4,7 --heads 2 --dim 16 --repeat 2 --warmup 1 --threads 1
exits 0 "csv" bench cqs "$@" --format csv
check "a row a case: 2 kernels x 2 tokens x 3 workers" test "$(wc -l <"$out")" -eq 13
exits 0 "json" bench cqs "$@" --causal --format json
check "the numbers hang together" python3 - "$out" <<'PYTHON'
import json, sys
d = json.load(open(sys.argv[1]))
assert d["schema_version"] == 1 and len(d["cases"]) == 12
for row in d["cases"]:
    assert row["status"] == "ok", row
    assert 0 < row["longest_worker_s"] <= row["all_workers_s"] * 1.0001, row
    assert row["bound"] <= row["workers"] * 1.0001, row
    assert abs(row["speedup"] - row["one_worker_s"] / row["longest_worker_s"]) < 1e-6 * row["speedup"], row
    assert 0 < row["measured_peak_bytes"] and 0 < row["predicted_peak_bytes"], row
    assert 0 < row["max_error"] < 1e-5 and 0 < row["relative_error"] < 1e-4, row
    if row["workers"] == 1:
        assert row["speedup"] == 1 and row["bound"] == 1, row
assert {row["kernel"] for row in d["cases"]} >= {"naive"}
PYTHON
exits 0 "table" bench cqs "$@" --kernel flash
prints 'speed-up' "the table has a head"
exits 0 "--dry-run" bench cqs "$@" --dry-run --format csv
check "--dry-run plans each case" test "$(grep -c planned "$out")" -eq 12

# out of memory: the score matrix of naive does not fit, flash does, and the sweep goes on
exits 0 "a sweep with a limit" bench cqs --tokens 4000 --workers 1,2,31 --heads 2 --dim 16 --repeat 1 --warmup 0 \
    --verify-rows 1 --threads 1 --mem-limit 60MiB --format csv
python3 - "$out" >"$work/status" <<'PYTHON'
import csv, sys
for row in csv.DictReader(open(sys.argv[1])):
    print(row["kernel"].split("-")[0], row["workers"], row["status"], bool(row["note"]))
PYTHON
check "naive does not fit on one worker" grep -q '^naive 1 OOM True$' "$work/status"
check "naive fits with 31" grep -q '^naive 31 ok' "$work/status"
check "flash fits on one" grep -q '^flash 1 ok' "$work/status"
check "every case has its row" test "$(wc -l <"$work/status")" -eq 6
exits 0 "a refused case is a row too" bench cqs --tokens 300 --workers 7 --kernel nosuch,flash --repeat 1 --format csv
check "the sweep goes on behind it" grep -q ',ok,' "$out"
check "refused" grep -q ',refused,' "$out"

exits 2 "no suite" bench
exits 2 "an unknown suite" bench nosuch
exits 2 "W = 0" bench cqs --workers 0
exits 2 "zero tokens" bench cqs --tokens 0
exits 2 "heads" bench cqs --heads 4 --kv-heads 3
finish
