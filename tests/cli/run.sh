#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn run: every format, layout and dtype against attention computed in Python; outputs, verify, reports.
. "$(dirname "$0")/tap.inc"
needs_python
arrays=$(dirname "$0")/arrays.py
python3 "$arrays" make "$work"

# of NAME OPTIONS...: runs q, k, v of that kind and compares
of() { # KIND SUFFIX OPTIONS...
    kind=$1
    suffix=$2
    shift 2
    rm -f "$work/o.npy" "$work/l.npy"
    exits 0 "run $kind $suffix $*" run --q "$work/q$suffix" --k "$work/k$suffix" --v "$work/v$suffix" \
        --out "$work/o.npy" --lse "$work/l.npy" "$@"
    check "run $kind $suffix $*: as computed in Python" \
        python3 "$arrays" check "$kind" "$work/o.npy" "$work/l.npy"
}

of full .npy
of full _v2.npy --workers 3
of full _v3.npy --workers 4
of full _f8.npy --workers 7
of full _f2.npy --workers 7
of bnhd _bnhd.npy --layout bnhd --workers 5
of bnhd _bnhd_f8.npy --layout bnhd --workers 2 --resident 2
of 3 _3.npy --workers 7
of 3nhd _3nhd.npy --layout bnhd --workers 7
of 2 _2.npy --workers 40
of full-causal .npy --causal --workers 6
of full-causal .npy --causal --workers 6 --classic
of full-causal .npy --window -1,0 --workers 13
of full .npy --window 1000,1000 --workers 7 --interest-set 0,1,3
of full .npy --workers 9 --quorum rectangular
of full .npy --workers 9 --quorum auto --threads 2
of full .npy --workers 7 --kernel naive
of full .npy --workers 7 --kernel reference
of full .npy --workers 7 --scale 0.44721359549995793

# safetensors
all="$work/all"
for dtype in F32 F16 BF16 F64; do
    rm -f "$work/o.safetensors"
    file=${all}_$dtype.safetensors
    exits 0 "tensors q, k, v of one $dtype file" run --q "$file" --k "$file" --v "$file" --workers 7 \
        --out "$work/o.safetensors" --lse "$work/l.safetensors"
    check "$dtype: as computed in Python" \
        python3 "$arrays" check full "$work/o.safetensors" "$work/l.safetensors"
done
exits 0 "tensors by name" run --q "${all}_F32.safetensors:q" --k "$work/only_k.safetensors:weights.k" \
    --v "$work/only_v.safetensors" --out "$work/o.npy" --verify
check "tensors by name: as computed in Python" python3 "$arrays" check full "$work/o.npy"
prints 'Verified +correct: 104 rows' "all rows are verified"

# types of the output
file=${all}_BF16.safetensors
exits 0 "bf16 to .npy" run --q "$file" --k "$file" --v "$file" --out "$work/o.npy"
tells 'npy has no bf16.*written as f32' "bf16 to .npy is told"
check "bf16 to .npy: as computed in Python" python3 "$arrays" check full-bf16 "$work/o.npy"
exits 2 "--out-dtype bf16 to .npy is refused" run --q "$file" --k "$file" --v "$file" --out "$work/o.npy" \
    --out-dtype bf16
for dtype in f16 bf16 f32; do
    exits 0 "--out-dtype $dtype" run --q "$work/q.npy" --k "$work/k.npy" --v "$work/v.npy" --workers 3 \
        --out "$work/o.safetensors" --out-dtype $dtype --verify
    check "--out-dtype $dtype: as computed in Python" python3 "$arrays" check full "$work/o.safetensors"
done
exits 0 "float64 inputs" run --q "$work/q_f8.npy" --k "$work/k_f8.npy" --v "$work/v_f8.npy" --out "$work/o.npy"
tells 'float64: it is converted to float32' "float64 inputs are told"

# the same bytes, whatever the threads and residents
set -- --random batch=2,heads=4,kv_heads=2,tokens=300,kv_tokens=411,dim=24,dim_v=40,causal --seed 5 --workers 7
exits 0 "one thread" run "$@" --out "$work/a.npy" --threads 1
for options in "--threads 2" "--threads 3 --resident 3" "--resident 7" "--spool $work/s" "--mem-limit 1GiB"; do
    # shellcheck disable=SC2086
    exits 0 "$options" run "$@" --out "$work/b.npy" $options
    check "$options: the same bytes" cmp "$work/a.npy" "$work/b.npy"
done
check "a finished spool is removed" test ! -e "$work/s"

# random inputs, saved, and run from the files
exits 0 "--save-inputs" run "$@" --save-inputs "$work/in" --out "$work/a.npy" --lse "$work/al.npy"
exits 0 "from the saved inputs" run --q "$work/in-q.npy" --k "$work/in-k.npy" --v "$work/in-v.npy" --causal \
    --workers 7 --out "$work/b.npy" --lse "$work/bl.npy"
check "o has the same bytes" cmp "$work/a.npy" "$work/b.npy"
check "lse has the same bytes" cmp "$work/al.npy" "$work/bl.npy"
exits 0 "another seed" run "$@" --seed 6 --out "$work/b.npy"
check "another seed, other bytes" sh -c "! cmp -s '$work/a.npy' '$work/b.npy'"
exits 0 "bf16 inputs are saved as .safetensors" run --random tokens=50,dim=8,dtype=bf16 --save-inputs "$work/h"
check "PREFIX-q.safetensors" test -s "$work/h-q.safetensors"
prints "q $work/h-q.safetensors" "their names are told"

# reports
exits 0 "summary" run "$@" --verify --picture "$work/p.svg"
prints 'Longest subsequence length +' "the summary is printed"
prints 'predicted peak .*measured peak' "predicted and measured peak are printed"
prints 'Verified +correct: 2400 rows' "the verdict is printed"
check "--picture" grep -q '<svg' "$work/p.svg"
exits 0 "json" run "$@" --verify-rows 9 --format json --out "$work/o.npy"
check "json keys and values" python3 - "$out" <<'PYTHON'
import json, sys
d = json.load(open(sys.argv[1]))
assert d["schema_version"] == 1 and d["workers"] == 7 and not d["dry_run"]
assert d["verify"]["passed"] and d["verify"]["rows"] == 9 * 8
assert d["verify"]["max_error"] <= d["verify"]["max_error_tolerance"]
assert d["out"]["shape"] == [2, 4, 300, 40] and d["out"]["dtype"] == "f32"
assert d["time"]["wall_s"] > 0 and d["summary"]["cells"] > 0
PYTHON
if ! has_sanitizer; then
    check "the measured peak is within the predicted one" python3 - "$out" <<'PYTHON'
import json, sys
memory = json.load(open(sys.argv[1]))["memory"]
assert memory["predicted_peak_bytes"] >= memory["measured_peak_bytes"] > 0
PYTHON
fi
exits 0 "csv" run "$@" --verify-rows 2 --format csv
check "csv has a header and a row" test "$(wc -l <"$out")" -eq 2
rm -f "$work/o.npy"
exits 0 "--dry-run" run "$@" --out "$work/o.npy" --dry-run
prints 'Plan of a run' "--dry-run prints the plan"
prints 'predicted peak' "--dry-run predicts the memory"
check "--dry-run writes nothing" test ! -e "$work/o.npy"
exits 0 "--output" run "$@" --format json --output "$work/report.json"
check "--output is JSON" python3 -m json.tool "$work/report.json"

# NaN and inf: computed as defined, told, or refused
cp "$work/v_3.npy" "$work/nan.npy"
python3 "$arrays" poison "$work/nan.npy" 52 nan
exits 0 "NaN in v" run --q "$work/q_3.npy" --k "$work/k_3.npy" --v "$work/nan.npy" --out "$work/o.npy" --verify
tells '1 input is not finite, the first in v at batch 0, head 1, token 0, dimension 1' "NaN in v is told"
prints 'rows see a NaN or inf' "the rows that see it are counted"
exits 2 "--strict" run --q "$work/q_3.npy" --k "$work/k_3.npy" --v "$work/nan.npy" --out "$work/no.npy" --strict
tells '--strict refuses' "--strict tells why"
check "--strict writes nothing" test ! -e "$work/no.npy"
check "--strict leaves nothing behind" test ! -e "$work/.no.npy.part"
python3 "$arrays" poison "$work/nan.npy" 3 inf
exits 0 "inf and NaN, causal" run --q "$work/q_3.npy" --k "$work/k_3.npy" --v "$work/nan.npy" --causal \
    --workers 5 --verify
tells '2 inputs are not finite' "both are counted"
finish
