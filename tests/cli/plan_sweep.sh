#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The published longest subsequences: each number of the sweep is at most the published one.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

tokens=10000,20000,30000,40000,45000,46000,47000,48000,49000
published() {
    cat <<'END'
4 7500 15000 22500 30000 33750 34500 35250 36000 36750
7 4287 8572 12858 17144 19287 19715 20144 20572 21000
8 5000 10000 15000 20000 22500 23000 23500 24000 24500
31 1937 3873 5808 7743 8711 8904 9099 9292 9486
END
}

exits 0 "csv" plan --tokens "$tokens" --workers 4,7,8,31 --format csv
check "36 cases" test "$(grep -c ',ok$' "$out")" -eq 36
published | while read -r workers bounds; do
    for bound in $bounds; do
        echo "$workers $bound"
    done
done >"$work/bounds"
awk -F, 'NR > 1 { print $1, $5, $2 }' "$out" >"$work/found"
paste -d' ' "$work/bounds" "$work/found" >"$work/both"
while read -r workers bound found_workers longest n; do
    check "W=$workers N=$n: $longest is at most $bound" \
        test "$workers" = "$found_workers" -a "$longest" -le "$bound"
done <"$work/both"

exits 0 "table" plan --tokens "$tokens" --workers 4,7,8,31
prints '^ +31 +6 +19[0-9][0-9] \(0\.19' "the matrix has a row for each W"
check "the matrix has 4 rows" test "$(grep -Ec '^ +[0-9]+ +[0-9]+ ' "$out")" -eq 4
exits 0 "md" plan --tokens "$tokens" --workers 4,7,8,31 --format md
prints '^\| 7 \| 3 \|' "md has a row for each W"
exits 0 "ranges" plan --tokens 10-40*2 --workers 3-7+2 --format csv
check "ranges: 3 x 3 cases" test "$(grep -c ',ok$' "$out")" -eq 9
exits 0 "a refused case is a row, and the sweep goes on" plan --tokens 100 --workers 3,4,5 --interest-set 0,1 \
    --format csv
check "1 row is ok" test "$(grep -c ',ok$' "$out")" -eq 1
check "2 rows have a reason" test "$(grep -c 'does not cover' "$out")" -eq 2
exits 0 "the same in the matrix" plan --tokens 100 --workers 3,4,5 --interest-set 0,1
tells 'warning: W=4, N=100: .*does not cover' "the reason is a warning"
exits 0 "repeating an option extends the list" plan --tokens 100 --workers 3 --workers 4 --format csv
check "2 rows" test "$(grep -c ',ok$' "$out")" -eq 2

needs_python
exits 0 "json" plan --tokens 100,200 --workers 4,7 --format json
check "json is valid" python3 -c '
import json, sys
sweep = json.load(open(sys.argv[1]))
assert sweep["schema_version"] == 1
assert [(r["workers"], r["tokens"]) for r in sweep["sweep"]] == [(4, 100), (4, 200), (7, 100), (7, 200)]
assert sweep["sweep"][0]["longest_subsequence"] == 75' "$out"
exits 0 "jsonl" plan --tokens 100,200 --workers 4,7 --format jsonl
check "jsonl: 4 objects" python3 -c '
import json, sys
assert len([json.loads(line) for line in open(sys.argv[1])]) == 4' "$out"
finish
