#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Pictures of a plan: SVG, PNG, terminal; the size cap.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

# fontconfig, which cairo asks for fonts, keeps its caches to the end
echo 'leak:libfontconfig' >"$work/leaks"
export LSAN_OPTIONS="suppressions=$work/leaks:print_suppressions=0"

svg=$work/plan.svg
exits 0 "svg" plan --tokens 10 --workers 7 --picture "$svg"
check "svg: it is there" test -s "$svg"
check "svg: readable by all that the umask lets" test "$(stat -c %a "$svg")" = "$(printf '%o' $((0666 & ~0$(umask))))"
check "svg: nothing else is left in the folder" test "$(find "$work" -name 'plan.svg*' | wc -l)" -eq 1
exits 4 "svg: a folder that is not there" plan --tokens 10 --workers 7 --picture "$work/none/plan.svg"
tells 'cannot write .*none/plan.svg: ' "svg: the message names the file"
exits 2 "a picture has its limit" plan --workers 5000 --picture "$svg"
tells 'up to 2048 workers' "a picture has its limit: told"

# ---- the terminal --------------------------------------------------------------------------------------
exits 0 "terminal, letters" plan --tokens 10 --workers 7 --interest-set 0,1,3 --picture -
prints '^  A A G A E E F F G G $|^  A A G A E E E E G G $' "terminal: the first row of the reference case"
check "terminal: no escapes without colours" test "$(grep -c "$(printf '\033')" "$out")" -eq 0
exits 0 "terminal, causal" plan --tokens 10 --workers 7 --causal --picture -
prints '^  A \. \. \. \. \. \. \. \. \. $' "terminal: masked cells are dots"
exits 0 "terminal, colours" plan --tokens 10 --workers 7 --picture - --color always
prints "$(printf '\033')\[38;5;[0-9]+;48;5;" "terminal: 256 colours"
COLORTERM=truecolor "$program" plan --tokens 10 --workers 7 --picture - --color always >"$out"
prints "$(printf '\033')\[38;5;[0-9]+;48;2;" "terminal: 24-bit colours"
NO_COLOR=1 "$program" plan --tokens 10 --workers 7 --picture - >"$out"
check "terminal: NO_COLOR" test "$(grep -c "$(printf '\033')" "$out")" -eq 0
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then # a machine may have no pseudo-terminals
    on_terminal() { # ENVIRONMENT: the picture as a terminal gets it
        script -qec "env $1 '$program' plan --tokens 10 --workers 7 --picture -" /dev/null >"$out" </dev/null
    }
    on_terminal TERM=xterm
    prints "$(printf '\033')\[38;5;" "a real terminal has colours"
    on_terminal "TERM=xterm NO_COLOR=1"
    check "a real terminal, NO_COLOR" test "$(grep -c "$(printf '\033')" "$out")" -eq 0
    on_terminal TERM=dumb
    check "a real terminal, TERM=dumb" test "$(grep -c "$(printf '\033')" "$out")" -eq 0
fi
exits 0 "terminal, many tokens" plan --tokens 100k --workers 31 --picture -
prints 'squares: each shows the cell in its middle' "terminal: many tokens are cut to squares"
check "terminal: lines fit 80 columns" test "$(awk 'length > 80' "$out" | wc -l)" -eq 0

# ---- PNG -------------------------------------------------------------------------------------------------
if "$program" --version | grep -q '+cairo'; then
    exits 0 "png" plan --tokens 10 --workers 7 --picture "$work/plan.png"
    check "png: its signature" test "$(od -An -tx1 -N8 "$work/plan.png" | tr -d ' ')" = 89504e470d0a1a0a
    exits 0 "png, hatched" plan --tokens 100 --workers 40 --causal --picture "$work/hatched.png"
else
    exits 3 "png without cairo" plan --tokens 10 --workers 7 --picture "$work/plan.png"
    tells 'libcairo2-dev' "png without cairo: the package is named"
    check "png without cairo: nothing is left" test ! -e "$work/plan.png"
fi

# ---- the SVG shows the schedule ---------------------------------------------------------------------------
needs_python
cat >"$work/svg.py" <<'END'
"""Rebuilds the owner of each cell from the paths of the SVG and compares it with the plan's JSON."""
import json, re, sys
import xml.etree.ElementTree as tree
ns = "{http://www.w3.org/2000/svg}"
root = tree.parse(sys.argv[1]).getroot()
assert root.tag == ns + "svg"
plan = json.load(open(sys.argv[2]))
n, w = plan["tokens"], plan["workers"]
scale = 640 / n
owner = {}
colors = set()
shapes = [g for g in root.iter(ns + "g") if g.find(ns + "title").text.startswith("worker ")]
for g in shapes[:w]:
    rank = int(re.match(r"worker (\d+):", g.find(ns + "title").text).group(1))
    colors.add(g.get("fill"))
    for x, y, width, height in re.findall(r"M(\S+) (\S+)h(\S+)v(\S+)h\S+z", g.find(ns + "path").get("d")):
        left, top = (float(x) - 70) / scale, (float(y) - 64) / scale
        for i in range(round(top), round(top + float(height) / scale)):
            for j in range(round(left), round(left + float(width) / scale)):
                assert (i, j) not in owner, "two workers draw one cell"
                owner[i, j] = rank
assert len(colors) == min(w, 8), colors
groups = [(g["first"], g["count"]) for g in plan["groups"]]
for rank in plan["ranks"]:
    for q, k, first, rows in [(q, k, *groups[q]) for q, k in rank["pairs"]] + rank["split_pairs"]:
        for i in range(first, first + rows):
            for j in range(groups[k][0], sum(groups[k])):
                assert owner.pop((i, j)) == rank["rank"]
assert not owner
assert "tokens" in root.find(ns + "title").text
END
for options in "--tokens 10 --workers 7" "--tokens 60 --workers 12" "--tokens 60 --workers 12 --causal" \
    "--tokens 64 --workers 20 --window 20,5" "--tokens 5 --workers 8"; do
    # shellcheck disable=SC2086
    "$program" plan $options --picture "$svg" --format json >"$out" 2>"$err"
    check "svg: it shows the schedule: $options" python3 "$work/svg.py" "$svg" "$out"
done
exits 0 "svg, many workers" plan --tokens 3000 --workers 400 --picture "$svg"
tells '400 x 400 blocks are too many to draw: .* 256 x 256 squares' "svg: the cap is told"
check "svg: capped, it is valid XML" python3 -c 'import sys, xml.etree.ElementTree as t; t.parse(sys.argv[1])' "$svg"
check "svg: capped, it stays below 8 MB" test "$(wc -c <"$svg")" -lt 8000000
finish
