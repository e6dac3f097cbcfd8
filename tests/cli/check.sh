#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn check: a line a kernel, a line a case, refusals, one case again.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"
needs_python

exits 0 "attn check --quick" check --quick --kernel flash-portable,naive --format json
check "a line a kernel, all right" python3 - "$out" <<'PYTHON'
import json, sys
d = json.load(open(sys.argv[1]))
assert d["schema_version"] == 1 and d["machine"]["cores"] >= 1
rows = {row["kernel"]: row for row in d["kernels"]}
assert set(rows) == {"flash-portable", "naive"}
for row in rows.values():
    assert row["status"] == "ok" and row["cases"] > 30 and row["wrong"] == 0, row
    assert 0 < row["forward_share"] <= 1 and 0 < row["forward_error_rel"] < 0.01, row
row = rows["flash-portable"]
assert 0 < row["backward_share"] <= 1 and 0 < row["backward_error_rel"] < 0.01, row
assert d["wrong"] == 0 and d["ran"] == sum(row["cases"] for row in rows.values())
PYTHON

exits 0 "a line a case" check --quick --kernel flash-portable --verbose --format csv
check "each tells its problem" test "$(grep -c 'batch=.*dtype=' "$out")" -gt 30
for what in causal window= bnhd transposed 'huge logit' 'all equal' nan workers f16 bf16; do
    check "some case has $what" grep -q "$what" "$out"
done
exits 0 "one case" check --quick --kernel flash-portable --case 3 --verbose --seed 5
prints '^1 cases with 1 kernels: all right' "it alone"

ATTN_ISA=ref exits 0 "a level that hides kernels" check --quick --case 0
check "a kernel that cannot run is a line with the reason" grep -Eq '^flash-avx2 +refused .*(ATTN_ISA|built)' "$out"
check "the others run" grep -Eq '^flash-portable +ok' "$out"

exits 2 "an unknown kernel" check --kernel nosuch
tells 'there is no such kernel' "it is told"
exits 2 "a case that is not there" check --quick --case 100000
finish
