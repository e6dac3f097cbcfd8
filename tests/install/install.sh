#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh - installs into a prefix in the build folder, then builds and runs the examples against the
# installed tree by find_package and by pkg-config, and looks that everything else is in place.
#
# usage: install.sh SOURCE-FOLDER BUILD-FOLDER CC GENERATOR
set -eu
source=$1
build=$2
cc=$3
generator=$4
prefix=$build/prefix
moved=$build/prefix-moved
out=$build/prefix-examples
rm -rf "$prefix" "$moved" "$out"
mkdir -p "$out/pc"

cmake --install "$build" --prefix "$prefix" >"$out/install.log"

is_there()
{
    # shellcheck disable=SC2086 # a pattern
    set -- $1
    [ -s "$1" ] || {
        echo "not installed: $1"
        exit 1
    }
}
is_there "$prefix/include/attn/attn.h"
is_there "$prefix/include/attn/comm.h"
is_there "$prefix/lib*/libattn.*"
is_there "$prefix/lib*/pkgconfig/attn.pc"
is_there "$prefix/share/man/man3/attn.3"
if [ -d "$build/written" ]; then
    is_there "$prefix/share/man/man1/attn.1"
    verbs=$("$prefix/bin/attn" help | awk '/^Verbs:/ { on = 1; next } /^$/ { on = 0 } on && /^  [a-z]/ {
        sub(/^  /, ""); sub(/  .*/, ""); gsub(/ /, "-"); print }')
    for verb in $verbs; do
        is_there "$prefix/share/man/man1/attn-$verb.1"
    done
    is_there "$prefix/share/bash-completion/completions/attn"
    is_there "$prefix/share/zsh/site-functions/_attn"
    is_there "$prefix/share/fish/vendor_completions.d/attn.fish"
fi

# The installed tree must not care where it lies.
mv "$prefix" "$moved"
"$moved/bin/attn" --version

echo "== find_package"
if ! { cmake -S "$source/examples" -B "$out/cmake" -G "$generator" -DCMAKE_PREFIX_PATH="$moved" \
    -DCMAKE_C_COMPILER="$cc" && cmake --build "$out/cmake"; } >"$out/cmake.log" 2>&1; then
    cat "$out/cmake.log"
    exit 1
fi
(cd "$out/cmake" && ctest --output-on-failure)

if ! command -v pkg-config >/dev/null 2>&1; then
    echo "pkg-config is not there: that half is skipped"
    exit 0
fi
echo "== pkg-config"
PKG_CONFIG_PATH=$(dirname "$(find "$moved" -name attn.pc)")
export PKG_CONFIG_PATH
wanted=$(sed -n 's/^#define ATTN_VERSION_M[A-Z]* *\([0-9]*\)$/\1/p' "$source/include/attn/attn.h" | paste -s -d .)
pkg-config --exists "attn >= $wanted"
for example in "$source"/examples/*.c; do
    name=$(basename "$example" .c)
    # shellcheck disable=SC2046 # flags are words
    "$cc" -std=c11 -O2 $(pkg-config --cflags attn) "$example" -o "$out/pc/$name" $(pkg-config --libs attn) -lm \
        -Wl,-rpath,"$(pkg-config --variable=libdir attn)"
    code=0
    "$out/pc/$name" >"$out/pc/$name.out" || code=$?
    case $code in
    0) echo "$name: right" ;;
    77) echo "$name: $(cat "$out/pc/$name.out")" ;;
    *)
        cat "$out/pc/$name.out"
        echo "$name: wrong"
        exit 1
        ;;
    esac
done
