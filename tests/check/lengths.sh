#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# lengths.sh - files and functions are short, and script/check-lengths would say if they were not.
#
# usage: lengths.sh SOURCE-FOLDER
set -eu
cd "$1"
script/check-lengths

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/script" "$tree/src/base" "$tree/src/kernel/cpu"
failed=0

# function_of LINES: a function of so many lines, head and braces included
function_of()
{
    printf 'int\nsum(int a,\n    int b)\n{\n' | sed '1d' | sed '1s/^/int /'
    i=4
    while [ "$i" -lt "$1" ]; do
        echo "    a += b;"
        i=$((i + 1))
    done
    echo "}"
}

# expect yes|no NAME: is the tree let through?
expect()
{
    if script/check-lengths "$tree" >"$tree/said"; then
        got=yes
    else
        got=no
    fi
    if [ "$got" = "$1" ]; then
        echo "ok - $2"
    else
        echo "not ok - $2: $(cat "$tree/said")"
        failed=1
    fi
}

function_of 60 >"$tree/src/base/x.c"
expect yes "a function of 60 lines"
function_of 61 >"$tree/src/base/x.c"
expect no "a function of 61 lines"
echo "src/base/x.c:sum 61" >"$tree/script/lengths.allow"
expect yes "61 lines that are allowed"
function_of 62 >"$tree/src/base/x.c"
expect no "62 lines where 61 are allowed"
echo "src/base/x.c:sum 70" >"$tree/script/lengths.allow"
expect no "an exception larger than the function"
function_of 50 >"$tree/src/base/x.c"
expect no "an exception that is not needed any more"
echo "src/base/x.c:gone 61" >"$tree/script/lengths.allow"
expect no "an exception for something that is gone"
rm "$tree/script/lengths.allow"
function_of 150 >"$tree/src/kernel/cpu/x.c"
expect yes "an inner kernel of 150 lines"
function_of 151 >"$tree/src/kernel/cpu/x.c"
expect no "an inner kernel of 151 lines"
rm "$tree/src/kernel/cpu/x.c"
yes '/* */' | head -n 501 >"$tree/src/base/y.c"
expect no "a file of 501 lines"
yes '/* */' | head -n 500 >"$tree/src/base/y.c"
expect yes "a file of 500 lines"
exit "$failed"
