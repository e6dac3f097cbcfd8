#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The program without a GPU: what it says and its exit code; with one, a case of each verb.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

exits 0 "attn info tells of GPUs" info
if grep -Eq '^gpu +0 +missing' "$out"; then
    check "why there is none" grep -Eq '^gpu +0 +missing +(no CUDA driver|the CUDA driver|GPU 0 )' "$out"
    for verb in "bench attention" "bench cqs" check; do
        # shellcheck disable=SC2086 # words
        exits 3 "attn $verb --device cuda" $verb --device cuda
        tells 'GPU|CUDA' "what is missing"
        tells 'device cpu' "what to do instead"
        check "and writes no data" test ! -s "$out"
    done
    exits 3 "a plan of a bench wants the GPU, too" bench attention --device cuda --dry-run
    exits 3 "attn run --device cuda" run --random heads=2,tokens=100,dim=64 --device cuda --out "$work/o.npy"
    tells 'GPU|CUDA' "what is missing"
    check "and leaves no file" test ! -e "$work/o.npy"
    exits 3 "attn plan --device cuda" plan --tokens 100 --workers 1 --device cuda --explain
    tells 'device cpu' "what to do instead"
else
    exits 0 "attn bench attention --device cuda" bench attention --device cuda --seq 256 --dtype bf16 --repeat 2 \
        --contestant flash
    prints '^flash +sm90 .* ok ' "a row, right"
    exits 0 "attn check --device cuda" check --device cuda --quick --case 3
fi
exits 2 "threads belong to the CPU" bench attention --device cuda --threads 2
tells '--threads belongs to --device cpu' "it is told"
exits 2 "no such device" check --device tpu
tells 'cpu.*cuda' "which there are"
finish
