#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn plan for one case: the reference case, JSON, coverage recounted from the JSON, proof, costs, search.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

# ---- the reference case -------------------------------------------------------------------------------
exits 0 "the reference case" plan --tokens 10 --workers 7 --interest-set 0,1,3
prints '0:\[0\] 1:\[1\] 2:\[2\] 3:\[3\] 4:\[4-5\] 5:\[6-7\] 6:\[8-9\]' "group map: 1,1,1,1,2,2,2 tokens"
prints '^  quorum +1 2 4$' "quorum of worker 1"
prints '^  pairs before distillation \(0,0\) \(0,1\) \(0,3\) \(1,0\)' "pairs before distillation"
prints '^  pairs after distillation +\(0,0\) \(0,1\) \(0,3\) \(1,0\) \(1,3\) \(3,0\) \(3,1\)$' \
    "pairs after distillation: without (1,1) and (3,3)"
prints '^  material list +Q0 Q1 Q3 KV0 KV1 KV3$' "material list"
prints '^  task list +Q \[0\] x KV \[0\] \[1\] \[3\]$' "task list"
prints 'Longest subsequence length +5 tokens, ratio to N 0\.5000' "summary: longest"
prints 'Shortest subsequence length +3 tokens, ratio to N 0\.3000' "summary: shortest"
prints 'Average subsequence length +4\.29 tokens, ratio to N 0\.4286' "summary: average"
prints 'Standard deviation +0\.70' "summary: standard deviation"
check "7 workers" test "$(grep -c '^Worker ' "$out")" -eq 7

exits 0 "one worker" plan --tokens 10 --workers 7 --rank 3
check "one worker only" test "$(grep -c '^Worker 3' "$out")" -eq 1 -a "$(grep -c '^Worker ' "$out")" -eq 1
exits 0 "fewer tokens than workers" plan --tokens 3 --workers 7
exits 0 "one worker has all" plan --tokens 3 --workers 1
exits 0 "cross attention" plan --tokens 10 --kv-tokens 25 --workers 5
prints 'key groups' "cross attention: groups of keys"

# ---- sections ------------------------------------------------------------------------------------------
for options in "301 --workers 1" "1 --workers 2" "301 --workers 20" "301 --workers 20 --causal" \
    "301 --workers 20 --classic --causal" "301 --workers 31 --window 9,3" "301 --workers 12 --quorum rectangular" \
    "301 --workers 12 --quorum rectangular --rectangle 3 --causal" "20 --workers 50 --causal" \
    "100 --workers 9 --kv-tokens 30 --causal" "301 --workers 16 --quorum auto --heads 8 --kv-heads 2"; do
    # shellcheck disable=SC2086
    exits 0 "proof: $options" plan --tokens $options --prove
    prints '^ *([0-9]+) +\1 +0 +0 +yes$' "proof: every cell once: $options"
done
exits 0 "costs" plan --tokens 1000 --workers 13 --causal --cost
prints '^ +cyclic +rectangular +ring +ulysses$' "costs: the four schemes"
prints '^ulysses: not possible' "costs: why Ulysses is not possible with one head"
exits 0 "costs as csv" plan --tokens 1000 --workers 4 --heads 8 --cost --format csv
prints '^ulysses,' "costs: Ulysses"
check "costs: 5 lines" test "$(wc -l <"$out")" -eq 5
exits 0 "kernels" plan --workers 7 --explain
prints ' chosen ' "kernels: one is chosen"
prints '^naive .*not taken +[a-z]' "kernels: a refusal has its reason"
exits 0 "a kernel by name" plan --workers 7 --kernel reference --explain
prints '^reference +chosen' "kernels: the named one is chosen"
exits 0 "memory limit picks W" plan --tokens 100000 --heads 4 --mem-limit 160MiB
prints '^100000 tokens, [0-9]+ workers' "memory limit: a W is found"

# ---- the search ------------------------------------------------------------------------------------------
exits 0 "search" plan --search 13 --size 4 --seconds 30 --format csv
prints '^13,4,"0,[0-9]+,[0-9]+,[0-9]+"$' "search: a set of 4 for W=13"
set_found=$(sed -n 's/^13,4,"\(.*\)"$/\1/p' "$out")
exits 0 "search: the set is a cover" plan --workers 13 --interest-set "$set_found"
exits 2 "search: what cannot be is refused" plan --search 13 --size 3
exits 1 "search: time runs out" plan --search 200 --size 15 --seconds 0.2
tells 'no such interest set found' "search: says so"

# ---- very many workers -------------------------------------------------------------------------------------
begin=$(date +%s)
exits 0 "W = 1000003, as text" plan --workers 1000003
prints '^1000003 tokens, 1000003 workers' "W = 1000003: tokens default to W"
exits 0 "W = 1000003, rank 77, as JSON" plan --workers 1000003 --rank 77 --format json
check "W = 1000003: both within 10 s" test $(($(date +%s) - begin)) -le 10

needs_python
check "W = 1000003: the rank's pairs" python3 - "$out" <<'END'
import json, sys
plan = json.load(open(sys.argv[1]))
rank, = plan["ranks"]
w, held = plan["workers"], set(rank["groups"])
assert rank["rank"] == 77 and len(held) == plan["quorum_size"] <= 1.26 * w ** 0.5 + 2
pairs = rank["pairs"]
assert len(pairs) == w  # odd W: one ordered pair for each difference
assert len({(q - k) % w for q, k in pairs}) == w
assert all(q in held and k in held for q, k in pairs)
END

# ---- JSON, and coverage recounted -----------------------------------------------------------------------------
cat >"$work/cover.py" <<'END'
"""Counts from the JSON alone how often each visible cell is owned, and checks cells, tokens and keys."""
import json, sys
plan = json.load(open(sys.argv[1]))
keys = ["schema_version", "tokens", "workers", "interest_set", "quorum_size", "longest_subsequence",
        "shortest_subsequence", "groups", "ranks"]
assert list(plan)[:9] == keys, list(plan)
problem, w = plan["problem"], plan["workers"]
nq, nk = problem["tokens"], problem["kv_tokens"]
shift = nk - nq
lo, hi = {"full": (-nq, nk), "causal": (-nq - nk, shift)}.get(problem["mask"], (None, None))
if problem["mask"] == "window":
    left, right = problem["window"]
    lo = shift - left if left >= 0 else -nq - nk
    hi = shift + right if right >= 0 else nq + nk
groups_q = [(g["first"], g["count"]) for g in plan["groups"]]
groups_k = [(g["first"], g["count"]) for g in plan.get("groups_kv", plan["groups"])]
for groups, n in ((groups_q, nq), (groups_k, nk)):
    counts = [count for _, count in groups]
    assert len(counts) == w and sum(counts) == n and counts == sorted(counts)
    assert counts[-1] - counts[0] <= 1
    assert all(groups[i][0] == sum(counts[:i]) for i in range(w))
owned = [bytearray(nk) for _ in range(nq)]
for rank in plan["ranks"]:
    assert list(rank)[:7] == ["rank", "groups", "tokens", "pairs", "cells", "bytes_in", "bytes_out"]
    cells, held = 0, set(rank["groups"])
    blocks = [(q, k, *groups_q[q]) for q, k in rank["pairs"]] + rank["split_pairs"]
    for q, k, first, rows in blocks:
        assert q in held and k in held
        assert groups_q[q][0] <= first and first + rows <= sum(groups_q[q])
        for i in range(first, first + rows):
            for j in range(groups_k[k][0], sum(groups_k[k])):
                if lo <= j - i <= hi:
                    owned[i][j] += 1
                    cells += 1
    assert cells == rank["cells"], (rank["rank"], cells, rank["cells"])
    if "groups_kv" not in plan:
        assert rank["tokens"] == sum(groups_q[g][1] for g in held)
for i in range(nq):
    for j in range(nk):
        assert owned[i][j] == (1 if lo <= j - i <= hi else 0), (i, j, owned[i][j])
tokens = [rank["tokens"] for rank in plan["ranks"]]
assert plan["longest_subsequence"] == max(tokens) and plan["shortest_subsequence"] == min(tokens)
assert sum(bin["workers"] for bin in plan["summary"]["histogram"]) == w
END
for options in "--tokens 10 --workers 7 --interest-set 0,1,3" "--tokens 64 --workers 1" \
    "--tokens 61 --workers 8" "--tokens 61 --workers 8 --causal" "--tokens 61 --workers 8 --classic --causal" \
    "--tokens 61 --workers 8 --classic" "--tokens 5 --workers 12 --causal" "--tokens 100 --workers 21 --causal" \
    "--tokens 97 --workers 20 --window 13,4" "--tokens 40 --kv-tokens 77 --workers 6 --causal" \
    "--tokens 77 --kv-tokens 40 --workers 6 --causal" "--tokens 90 --workers 10 --quorum rectangular" \
    "--tokens 90 --workers 30 --window -1,0" "--tokens 200 --workers 111"; do
    # shellcheck disable=SC2086
    exits 0 "json: $options" plan $options --format json
    check "json: every cell once: $options" python3 "$work/cover.py" "$out"
done
exits 0 "json with all sections" plan --tokens 100 --workers 7 --causal --prove --cost --explain --format json
check "json: sections" python3 -c '
import json, sys
plan = json.load(open(sys.argv[1]))
assert plan["proof"] == [{"cells": 5050, "once": 5050, "missing": 0, "repeated": 0, "exact": True}]
assert [row["scheme"] for row in plan["cost"]] == ["cyclic", "rectangular", "ring", "ulysses"]
assert sum(row["verdict"] == "chosen" for row in plan["kernels"]) == 1' "$out"
exits 0 "csv: a row a worker" plan --tokens 100 --workers 7 --format csv
check "csv: 8 lines" test "$(wc -l <"$out")" -eq 8
exits 0 "jsonl" plan --tokens 100 --workers 7 --format jsonl
check "jsonl: 7 objects" python3 -c '
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert [row["rank"] for row in rows] == list(range(7))' "$out"
exits 0 "even W is balanced" plan --tokens 8000 --workers 8 --causal --format json
check "even W: causal cells differ by less than 1 %" python3 -c '
import json, sys
cells = [rank["cells"] for rank in json.load(open(sys.argv[1]))["ranks"]]
assert max(cells) <= 1.01 * min(cells), cells' "$out"
finish
