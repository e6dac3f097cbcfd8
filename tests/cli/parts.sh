#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# parts.sh - the main job works whatever optional parts this build has; what a missing part would have done
# is refused with exit code 3 and the name of the package that brings it.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"
needs_python
arrays=$(dirname "$0")/arrays.py
python3 "$arrays" make "$work"

# fontconfig, which cairo asks for fonts, keeps its caches to the end
echo 'leak:libfontconfig' >"$work/leaks"
export LSAN_OPTIONS="suppressions=$work/leaks:print_suppressions=0"

exits 0 "files in, file out, verified" run --q "$work/q.npy" --k "$work/k.npy" --v "$work/v.npy" \
    --out "$work/o.npy" --lse "$work/l.npy" --workers 7 --verify
check "as computed in Python" python3 "$arrays" check full "$work/o.npy" "$work/l.npy"
exits 0 "a plan as SVG" plan --tokens 49 --workers 7 --picture "$work/p.svg"
check "it is SVG" grep -q '</svg>' "$work/p.svg"

# part WHAT PACKAGE COMMAND...: works if `attn info` has the part, else is refused and told
part() {
    what=$1
    package=$2
    shift 2
    "$program" info --format csv >"$work/info"
    if grep -q ",$what,built in," "$work/info"; then
        exits 0 "$what is built in: $1 works" "$@"
    else
        check "info names $package" grep -q "$what,missing,.*$package" "$work/info"
        exits 3 "$what is missing: $1 is refused" "$@"
        tells "$package" "it is told which package brings $what"
    fi
}

part Random123 librandom123-dev run --random heads=1,tokens=50,dim=8 --out "$work/r.npy"
part cairo libcairo2-dev plan --tokens 49 --workers 7 --picture "$work/p.png"
finish
