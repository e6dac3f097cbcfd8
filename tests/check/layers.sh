#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# layers.sh - the tree keeps its layers, and script/check-layers would say if it did not.
#
# usage: layers.sh SOURCE-FOLDER
set -eu
cd "$1"
script/check-layers

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failed=0

# breach FILE 'INCLUDE' TEXT: a tree with that one breach is refused, and the message holds TEXT
breach()
{
    rm -rf "$tree"
    mkdir -p "$tree/include/attn" "$tree/src/base" "$tree/src/quorum" "$tree/src/kernel/cpu" "$tree/src/comm" \
        "$tree/src/engine" "$tree/src/utils" "$tree/cli" "$tree/examples" "$tree/bench" "$tree/tests"
    : >"$tree/include/attn/attn.h"
    for module in base quorum kernel comm engine; do
        printf '#include "attn/attn.h"\n' >"$tree/src/$module/$module.h"
    done
    : >"$tree/cli/cli.h"
    printf '#include "base/base.h"\n#include <stdio.h>\n' >"$tree/src/engine/legal.c"
    (cd "$tree" && "$OLDPWD/script/check-layers" . >/dev/null) || {
        echo "not ok - a legal tree is refused"
        failed=1
    }
    printf '%s\n' "$2" >"$tree/$1"
    if text=$(script/check-layers "$tree"); then
        echo "not ok - $1 with $2 is let through"
        failed=1
    elif ! echo "$text" | grep -qF "$3"; then
        echo "not ok - $1 with $2: no '$3' in: $text"
        failed=1
    else
        echo "ok - $1 may not have $2"
    fi
}

breach src/base/x.c '#include "quorum/quorum.h"' 'base may not include'
breach src/quorum/x.c '#include "kernel/kernel.h"' 'quorum may not include'
breach src/quorum/x.c '#include "../kernel/kernel.h"' 'quorum may not include'
breach src/kernel/x.c '#include "comm/comm.h"' 'kernel may not include'
breach src/kernel/cpu/x.c '#include "../../engine/engine.h"' 'kernel may not include'
breach src/comm/x.h '   #   include "engine/engine.h"' 'comm may not include'
breach cli/x.c '#include "base/base.h"' 'cli may not include'
breach cli/x.c '#include "../src/base/base.h"' 'cli may not include'
breach examples/x.c '#include "../cli/cli.h"' 'examples may not include'
breach bench/x.c '#include "kernel/kernel.h"' 'bench may not include'
breach include/attn/x.h '#include "base/base.h"' 'api may not include'
breach src/engine/x.c '#include <mpi.h>' 'may not need <mpi.h>'
breach src/engine/x.c '#include <cairo/cairo.h>' 'may not need <cairo/cairo.h>'
breach src/engine/x.c '#include <immintrin.h>' 'intrinsics belong'
breach src/engine/x.c '#include HIDDEN' 'by macro'
breach src/engine/x.c '#include "nowhere.h"' 'there is no'
breach src/utils/x.c '#include <stdio.h>' 'not known'
exit "$failed"
