#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn bench attention: a row a case, right results forward and backward, OOM and refusals as rows, presets.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"
needs_python

small="--seq 96 --heads 4 --dim 16 --repeat 2 --warmup 1 --threads 1"

# shellcheck disable=SC2086 # a list of options
exits 0 "every contestant, every pass, as json" bench attention $small --contestant all \
    --pass forward,backward,both --causal false,true --dtype f32,bf16 --kv-heads 4,2 --format json
check "the numbers hang together" python3 - "$out" <<'PYTHON'
import json, sys
d = json.load(open(sys.argv[1]))
assert d["schema_version"] == 1 and d["machine"]["cpu"] and d["machine"]["cores"] >= 1
rows = d["rows"]
names = {row["contestant"] for row in rows}
assert {"flash", "flash-portable", "naive"} <= names, names
assert len(rows) == len(names) * 3 * 2 * 2 * 2, len(rows)
keys = ("contestant isa pass batch seq heads kv_heads dim causal dtype threads first_ms mean_ms std_ms median_ms min_ms "
        "max_ms gflops percent_of_peak predicted_peak_mb peak_mb error_max error_rel status").split()
factor = {"forward": 1, "backward": 2.5, "both": 3.5}
for row in rows:
    assert list(row)[:len(keys)] == keys, list(row)
    assert row["status"] in ("ok", "refused"), row
    assert row["status"] == "ok" or row["note"], row
    assert not (row["contestant"] in ("flash", "flash-portable") and row["status"] != "ok"), row
    if row["status"] != "ok":
        continue
    assert row["threads"] == 1 and row["samples"] == 2 and row["first_ms"] > 0
    assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
    assert row["min_ms"] <= row["mean_ms"] <= row["max_ms"] and row["std_ms"] >= 0
    cells = 96 * 97 / 2 if row["causal"] else 96 * 96
    flops = 4 * 4 * cells * 16 * factor[row["pass"]]
    assert abs(row["gflops"] * row["median_ms"] * 1e6 / flops - 1) < 1e-6, (row, flops)
    assert row["peak_mb"] > 0 and row["predicted_peak_mb"] > 0
    assert 0 < row["error_max"] < (0.05 if row["dtype"] == "bf16" else 1e-5), row
    assert 0 < row["error_rel"] < (0.01 if row["dtype"] == "bf16" else 1e-5), row
    if row["percent_of_peak"] is not None:
        assert 0 < row["percent_of_peak"], row
    if row["pass"] == "backward":
        assert row["before_backward_mb"] > 0
assert all(row["percent_of_peak"] for row in rows if row["contestant"] == "flash-portable")
PYTHON

# shellcheck disable=SC2086
exits 0 "csv" bench attention $small --contestant flash --seq 33 --seconds 0 --format csv
check "--seq twice extends the list" test "$(wc -l <"$out")" -eq 3
check "the same names as in json" grep -q '^contestant,isa,pass,.*,gflops,percent_of_peak,.*,status,' "$out"
# shellcheck disable=SC2086
exits 0 "table" bench attention $small
prints 'TFLOP/s' "people get TFLOP/s"
exits 0 "--dry-run" bench attention --batch 2 --seq 64,128 --embedding 64,128 --heads 2,4 --dry-run --format csv
check "--dry-run: a row a case" test "$(grep -c ',planned,\|,refused,' "$out")" -eq 16

# a score matrix of 4 heads x 4096 x 4096 does not fit, flash does, and the sweep goes on
exits 0 "a limit" bench attention --seq 4096,64 --heads 4 --dim 16 --repeat 1 --warmup 0 --rows 1 --threads 1 \
    --mem-limit 100MB --format csv
python3 - "$out" >"$work/status" <<'PYTHON'
import csv, sys
for row in csv.DictReader(open(sys.argv[1])):
    print(row["contestant"], row["seq"], row["status"], bool(row["note"]))
PYTHON
check "flash fits" grep -q '^flash 4096 ok' "$work/status"
if "$program" info --format csv | grep -q ',OpenBLAS,built in,'; then
    check "naive does not" grep -q '^naive 4096 OOM True$' "$work/status"
    check "the sweep goes on" grep -q '^naive 64 ok' "$work/status"
else
    check "naive says what it needs" grep -q 'libopenblas-dev' "$out"
fi
exits 0 "sizes that make no problem are rows" bench attention --heads 4 --kv-heads 3,2 --seq 32 --repeat 1 \
    --contestant flash --format csv
check "one refused, one not" test "$(grep -c ',refused,' "$out")-$(grep -c ',ok,' "$out")" = 1-1

exits 0 "--preset flash-vs-naive" bench attention --preset flash-vs-naive --dry-run --scale-down 16
prints '^parameter +value +contestant +forward time \(s\) +TFLOP/s +peak memory \(MB\)' "its columns"
prints '^embedding +4096 +naive .*batch 32/16' "its rows, scaled down"
check "14 cases, 2 contestants" test "$(grep -c 'flash \|naive ' "$out")" -eq 28
exits 0 "--preset d-model" bench attention --preset d-model --dry-run --mem-limit 8GiB
prints '^ *d_model +seq +contestant +forward mean \(ms\) +backward mean \(ms\) +memory before backward \(MB\)' "its columns"
check "20 cases, 2 contestants" test "$(grep -c 'flash \|naive ' "$out")" -eq 40
exits 0 "a preset as data" bench attention --preset d-model --dry-run --format csv
check "has the full rows, a pass each" test "$(wc -l <"$out")" -eq 81

refused() { # PATTERN ARGUMENT...
    pattern=$1
    shift
    exits 2 "bench attention $* is refused" bench attention "$@"
    tells "$pattern" "it is told why"
    check "and no data is written" test ! -s "$out"
}
refused 'did you mean naive' --contestant nave
refused 'not both' --dim 64 --embedding 64
refused 'leave out --batch' --preset d-model --batch 3
refused 'belongs to --preset' --scale-down 2
refused 'must be forward, backward or both' --pass sideways
refused 'must be at least 1' --seq 0
exits 2 "no suite" bench
tells 'needs a word: attention or cqs' "the suites are told"
exits 2 "an unknown suite" bench nosuch
exits 0 "bench --help" bench --help
prints 'bench cqs' "lists the suites"
finish
