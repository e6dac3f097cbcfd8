#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# --output: a file appears only when it is complete; an older one stays if anything fails.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

file=$work/plan.json
exits 0 "to a file" plan --tokens 10 --workers 7 --format json --output "$file"
check "nothing on stdout" test ! -s "$out"
"$program" plan --tokens 10 --workers 7 --format json >"$out"
check "the same as on stdout" cmp "$file" "$out"
cp "$out" "$work/before"
exits 2 "a failing command" plan --tokens 10 --workers 7 --interest-set 0,1 --format json --output "$file"
check "the older file stays" cmp "$file" "$work/before"
check "no temporary file is left" test "$(find "$work" -name 'plan.json*' | wc -l)" -eq 1
exits 4 "a folder that is not there" info --output "$work/none/info"
tells 'cannot write .*none/info: ' "the message names the file"
exits 4 "a folder as file" info --output "$work"
if [ -e /dev/full ]; then
    "$program" info >/dev/full 2>"$err"
    check "a full disk on stdout: exit code 4" test $? -eq 4
    tells 'cannot write to the standard output' "a full disk on stdout: told"
    "$program" --help >/dev/full 2>"$err"
    check "a full disk for --help: exit code 4" test $? -eq 4
fi
# a limit on the size of files stands for a full disk
(
    trap '' XFSZ
    ulimit -f 8
    "$program" plan --workers 1000 --format json --output "$work/big.json" 2>"$err"
)
check "a full disk: exit code 4" test $? -eq 4
tells 'cannot write .*big.json' "a full disk: told"
check "a full disk: nothing is left" test "$(find "$work" -name 'big.json*' | wc -l)" -eq 0

# a stopped program leaves no temporary file
"$program" plan --search 200 --size 15 --seconds 20 --output "$work/stopped" >/dev/null 2>&1 &
process=$!
tries=0
while [ "$(find "$work" -name 'stopped.*' | wc -l)" -eq 0 ] && [ $tries -lt 100 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
kill -TERM "$process"
wait "$process"
check "SIGTERM: exit code 143" test $? -eq 143
check "SIGTERM: no temporary file is left" test "$(find "$work" -name 'stopped*' | wc -l)" -eq 0
finish
