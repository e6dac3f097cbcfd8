# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# common.sh - what the scripts share; read it with `. script/common.sh` from the root of the tree.

die()
{
    echo "${0##*/}: $*" >&2
    exit 1
}

# tree_files PATTERN...: files of the tree that match, one a line: tracked ones and new ones that git would
# take; without git, whatever lies outside build/.
tree_files()
{
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files --cached --others --exclude-standard -- "$@" | while IFS= read -r file; do
            [ ! -e "$file" ] || printf '%s\n' "$file" # deleted, but not yet in git's eyes
        done | sort -u
    else
        for pattern in "$@"; do
            find . -path ./build -prune -o -path ./.git -prune -o -type f -name "$pattern" -print
        done | sed 's|^\./||' | sort -u
    fi
}

c_files()
{
    tree_files '*.c' '*.h' '*.cpp'
}

# Cores that this process may use.
cores()
{
    nproc 2>/dev/null || echo 2
}

# configure PRESET [-D...] - by ninja where it is there, else by make: both work.  A folder that was configured before, by
# hand perhaps, keeps what it has: CMake would refuse another.
configure()
{
    preset=$1
    shift
    if command -v ninja >/dev/null 2>&1; then
        CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja} cmake --preset "$preset" "$@"
    else
        cmake --preset "$preset" "$@"
    fi
}
