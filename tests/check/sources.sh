#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sources.sh - every source file is in the build and has its head, every script is executable, and
# script/check-sources would say if it were not so.
#
# usage: sources.sh SOURCE-FOLDER
set -eu
cd "$1"
script/check-sources

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failed=0
head='/* SPDX-License-Identifier: Apache-2.0 */
/* x.c - nothing. */'

legal()
{
    rm -rf "$tree"
    mkdir -p "$tree/src/base" "$tree/cmake" "$tree/bench"
    printf '%s\n' "$head" >"$tree/src/base/x.c"
    printf 'set(SOURCES\n    src/base/x.c)\n' >"$tree/cmake/sources.cmake"
    printf '#!/bin/sh\n' >"$tree/bench/measure.py"
    chmod +x "$tree/bench/measure.py"
}

# breach NAME TEXT: the tree as it is now is refused, and the message holds TEXT
breach()
{
    if text=$(script/check-sources "$tree"); then
        echo "not ok - $1 is let through"
        failed=1
    elif ! echo "$text" | grep -qF "$2"; then
        echo "not ok - $1: no '$2' in: $text"
        failed=1
    else
        echo "ok - $1"
    fi
}

legal
script/check-sources "$tree" >/dev/null || {
    echo "not ok - a legal tree is refused"
    failed=1
}
printf '%s\n' "$head" >"$tree/src/base/y.c"
breach "a source that is not built" 'src/base/y.c: not in cmake/sources.cmake'
legal
rm "$tree/src/base/x.c"
breach "a source that is gone" 'there is no such file'
legal
printf 'int x;\n' >"$tree/src/base/x.c"
breach "a source without its licence" 'no SPDX line'
legal
printf '%s\nint x;\n' "${head%%
*}" >"$tree/src/base/x.c"
breach "a source that does not tell what it is" 'no head comment'
legal
chmod -x "$tree/bench/measure.py"
breach "a script that cannot be called" 'bench/measure.py: begins with #!'
exit "$failed"
