#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn run: bad input and bad luck, each with its exit code and a message that says what is wrong; an output
# file is either complete or untouched.
. "$(dirname "$0")/tap.inc"
needs_python
arrays=$(dirname "$0")/arrays.py
python3 "$arrays" bad "$work"
good=$work/good.npy

# refuses CODE PATTERN NAME ARGUMENT...
refuses() {
    code=$1
    pattern=$2
    shift 2
    exits "$code" "$@"
    tells "$pattern" "$1: the message"
}

# as_q CODE PATTERN FILE: FILE as q, a good k and v
as_q() {
    refuses "$1" "$2" "q is $3" run --q "$work/$3" --k "$good" --v "$good" --out "$work/o.npy"
}

# files that cannot be understood
as_q 4 'only 0 bytes' empty.npy
as_q 4 'does not begin with' magic.npy
as_q 4 'cut off: its header says f32 \[4, 6\], 96 bytes, and 95 bytes follow' cut.npy
as_q 4 'too long' long.npy
as_q 4 'header of 118 bytes; the file has 40' header_cut.npy
as_q 4 'header of 65535 bytes' header_lies.npy
as_q 4 'Fortran order; convert it: .*ascontiguousarray' fortran.npy
as_q 4 'big-endian .*astype' big_endian.npy
as_q 4 "type '<i4'.*astype" int.npy
as_q 4 'negative' negative.npy
as_q 4 'too large' overflow.npy
as_q 4 'called .npy or .safetensors' text.txt
as_q 4 'cut off or no .safetensors' cut.safetensors
as_q 4 'bad header, at byte 9' json.safetensors
as_q 4 'type I32' int.safetensors
as_q 4 '2 tensors and none is called "q".*: a, b' two.safetensors
as_q 4 'no tensor "c"; it has: a, b' two.safetensors:c
as_q 4 'leave out :x' good.npy:x
as_q 4 'No such file' missing.npy
mkdir "$work/d.npy"
as_q 4 'not a regular file' d.npy

# shapes that do not fit
as_q 2 'shape \[1, 1, 1, 4, 6\]; 2, 3 or 4 dimensions' five.npy
as_q 2 'shape \[24\]; 2, 3 or 4 dimensions' vector.npy
as_q 2 'no tokens' no_tokens.npy
as_q 2 'it is empty' no_dim.npy
as_q 2 'shape \[6, 4\].*shape \[4, 6\]: the head dimensions differ' other_dim.npy
as_q 2 'same number of dimensions' rank3.npy
as_q 2 'q .*half.npy is f16 and k .*good.npy is f32' half.npy
refuses 2 'dim is 513' "dimension 513" run --q "$work/wide.npy" --k "$work/wide.npy" --v "$work/wide.npy"
refuses 2 'numbers of tokens differ' "v has fewer tokens" run --q "$good" --k "$good" --v "$work/other_tokens.npy"
refuses 2 'heads of k must divide' "heads 4 and 3" run --q "$work/heads4.npy" --k "$work/heads3.npy" \
    --v "$work/heads3.npy"
refuses 2 'numbers of heads differ' "k and v heads" run --q "$work/heads4.npy" --k "$work/heads2.npy" \
    --v "$work/heads4.npy"
refuses 2 'batch sizes differ' "batches" run --q "$work/batch2.npy" --k "$work/batch1.npy" --v "$work/batch1.npy"

# command lines
refuses 2 'give --q, --k and --v, or --random' "nothing to compute" run
refuses 2 '--v is missing' "q and k without v" run --q "$good" --k "$good"
refuses 2 '--q is missing' "k and v without q" run --k "$good" --v "$good"
refuses 2 'one or the other' "files and --random" run --q "$good" --random tokens=5,dim=2
refuses 2 'at least 1' "W = 0" run --random tokens=5,dim=2 --workers 0
refuses 2 'at least 1' "W = -3" run --random tokens=5,dim=2 --workers=-3
refuses 2 'must not be negative' "negative memory limit" run --random tokens=5,dim=2 --mem-limit=-1
refuses 2 'mem-limit' "memory limit that overflows" run --random tokens=5,dim=2 --mem-limit 99999999999GiB
refuses 2 'leaves nothing for the work' "memory limit of 1 MiB" run --random tokens=5,dim=2 --mem-limit 1MiB
refuses 2 'tokens' "zero tokens" run --random tokens=0,dim=2
refuses 2 'overflow|must be from' "sizes that overflow" run --random batch=1000000M,heads=1000000M,tokens=1000000M,dim=64
refuses 2 'no field of a problem' "unknown field" run --random tokens=5,dim=2,colour=3
refuses 2 'must divide' "kv_heads" run --random tokens=5,dim=2,heads=4,kv_heads=3
refuses 2 'did you mean' "unknown option" run --worker 3
refuses 2 'L,R' "--window 3" run --random tokens=5,dim=2 --window 3
refuses 2 'leave it out' "--scale 0" run --random tokens=5,dim=2 --scale 0
refuses 2 'scale' "--scale nan" run --random tokens=5,dim=2 --scale nan
refuses 2 'belongs to a number of workers' "interest set without W" run --random tokens=9,dim=2 --interest-set 0,1
refuses 2 'cover' "interest set that covers too little" run --random tokens=9,dim=2 --workers 7 --interest-set 0,1,2
refuses 2 'nosuch' "unknown kernel" run --random tokens=9,dim=2 --kernel nosuch
refuses 2 'needs --spool' "--keep-spool" run --random tokens=9,dim=2 --keep-spool
refuses 2 'needs --random' "--save-inputs" run --q "$good" --k "$good" --v "$good" --save-inputs x
refuses 2 'same file' "--out = --lse" run --random tokens=9,dim=2 --out "$work/x.npy" --lse "$work/x.npy"
refuses 2 'would replace the input' "--out = --q" run --q "$good" --k "$good" --v "$good" --out "$work/./good.npy"
refuses 2 'called .npy or .safetensors' "--out x.txt" run --random tokens=9,dim=2 --out "$work/x.txt"

# outputs that cannot be written: known before the work
refuses 4 'No such file' "--out in no folder" run --random tokens=9,dim=2 --out "$work/no/o.npy"
refuses 4 'not a regular file' "--out is a folder with that name" run --random tokens=9,dim=2 --out "$work/d.npy"
refuses 4 'cannot write' "--lse in no folder" run --random tokens=9,dim=2 --out "$work/o.npy" --lse "$work/no/l.npy"
check "the other output is not left behind" test ! -e "$work/o.npy" -a ! -e "$work/.o.npy.part"
if [ "$(id -u)" -ne 0 ]; then
    mkdir "$work/locked" && chmod 500 "$work/locked"
    refuses 4 'Permission denied' "--out in a locked folder" run --random tokens=9,dim=2 --out "$work/locked/o.npy"
fi

# a disk that takes no more: a limit on the size of files stands for it (in blocks of 512 bytes)
echo old >"$work/o.npy"
check "a full disk is found when the output is reserved" sh -c "
    ulimit -f 40
    '$program' run --random tokens=1000,dim=64 --out '$work/o.npy' 2>'$err'
    test \$? -eq 4"
tells 'cannot reserve 256128 bytes.*free some space' "a full disk: the message"
check "the older output stays" test "$(cat "$work/o.npy")" = old
check "nothing is left beside it" test ! -e "$work/.o.npy.part"
set -- --random tokens=1000,dim=64 --workers 7 --spool "$work/spool"
check "a full disk under the spool" sh -c "
    ulimit -f 20
    '$program' run --random tokens=1000,dim=64 --workers 7 --spool '$work/spool' 2>'$err'
    test \$? -eq 4"
tells 'make room and run the same command again' "a full disk under the spool: the message"
exits 0 "with room the same command goes on" run "$@" --verify

# two runs do not write the same file; the first one is then stopped by Ctrl-C
set -- --random heads=8,tokens=60000,dim=64
"$program" run "$@" --out "$work/both.npy" >"$work/first.out" 2>"$work/first.err" &
first=$!
for _ in 1 2 3 4 5 6 7 8 9 10; do
    test -e "$work/.both.npy.part" && break
    sleep 0.2
done
refuses 4 'another process is writing it' "two runs with one output" run "$@" --out "$work/both.npy"
kill -TERM "$first"
wait "$first"
check "stopped: exit code 130" test $? -eq 130
check "stopped: told" grep -q 'stopped; with --spool DIR' "$work/first.err"
check "stopped: no output" test ! -e "$work/both.npy" -a ! -e "$work/.both.npy.part"
finish
