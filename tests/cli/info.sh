#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn info in all formats.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

exits 0 "table" info
prints '^kernel +reference +usable' "the reference kernel is usable everywhere"
prints '^part +cairo +(built in|missing)' "optional parts"
exits 0 "csv" info --format csv
prints '^section,name,value,detail$' "csv has its header"
exits 0 "md" info --format md
prints '^\|---\|---\|---\|---\|$' "md has its rule"
if [ "$(uname -m)" = x86_64 ]; then
    ATTN_ISA=ref "$program" info >"$out"
    prints 'flash-avx2 +refused.*; refused: ' "ATTN_ISA=ref: vector kernels are refused with a reason"
    ATTN_ISA=avx512bf16 "$program" info >"$out"
    prints 'flash-amx +refused.*; refused: needs AMX' "ATTN_ISA=avx512bf16: tiles are refused"
fi
ATTN_ISA=sse9 "$program" info >"$out"
prints 'ATTN_ISA +sse9 +.*the levels are ref, avx2' "a level that is none is told"
code=0
ATTN_ISA=sse9 "$program" plan --tokens 9 --workers 3 >"$out" 2>"$err" || code=$?
check "and no plan is made" test "$code" = 2 -a ! -s "$out"
needs_python
exits 0 "json" info --format json
check "json is valid, with its keys" python3 - "$out" <<'END'
import json, sys
info = json.load(open(sys.argv[1]))
assert info["schema_version"] == 1
assert info["machine"]["cores"] >= 1
kernels = {k["name"]: k for k in info["kernels"]}
assert kernels["reference"]["usable"] is True and kernels["reference"]["reason"] is None
for kernel in kernels.values():
    assert kernel["usable"] == (kernel["reason"] is None)
for part in info["parts"]:
    assert isinstance(part["built_in"], bool) and part["package"]
END
exits 0 "jsonl" info --format jsonl
check "jsonl: each line is an object" python3 -c '
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert len(rows) > 8 and all(set(row) == {"section", "name", "value", "detail"} for row in rows)' "$out"
finish
