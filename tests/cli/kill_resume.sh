#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn run --spool: kill -9 at 20 random moments, damage, strangers and Ctrl-C; the bytes are always the same.
. "$(dirname "$0")/tap.inc"

problem=heads=2,kv_heads=1,dim=64,causal,tokens=
tokens=8000
spool=$work/spool

random() { # LESS: a number from 0 to LESS - 1
    echo $(($(od -An -N4 -tu4 /dev/urandom) % $1))
}

now() {
    date +%s%N
}

in_one_go() {
    set -- --random "$problem$tokens" --workers 13 --threads 1
    begin=$(now)
    exits 0 "$tokens tokens in one go" run "$@" --out "$work/whole.npy" --lse "$work/whole_lse.npy" --spool "$spool"
    length=$((($(now) - begin) / 1000000))
    echo "# in one go: $length ms"
}

in_one_go
if [ "$length" -gt 4000 ]; then # a build with sanitizers, say: the moments count, not how far apart they are
    tokens=3000
    in_one_go
fi
set -- --random "$problem$tokens" --workers 13 --threads 1
check "a complete run removes its spool" test ! -e "$spool"

same() {
    cmp "$work/whole.npy" "$work/o.npy" && cmp "$work/whole_lse.npy" "$work/lse.npy"
}

# ---- kill -9 at random moments of up to half of the run's length, over and over on the same spool
kills=0
finished=0
whole=true
rm -f "$work/o.npy" "$work/lse.npy"
while [ "$kills" -lt 20 ] && [ "$finished" -lt 60 ]; do
    "$program" run "$@" --out "$work/o.npy" --lse "$work/lse.npy" --spool "$spool" >"$out" 2>"$err" &
    child=$!
    sleep "$(awk "BEGIN { print $(random $((length / 2 + 20))) / 1000 }")"
    if kill -9 "$child" 2>/dev/null; then
        kills=$((kills + 1))
    fi
    wait "$child" 2>/dev/null
    status=$?
    if [ "$status" -eq 0 ]; then
        finished=$((finished + 1))
        same || whole=false
        rm -f "$work/o.npy" "$work/lse.npy"
    elif [ "$status" -ne 137 ]; then
        whole=false
        sed 's/^/# /' "$err"
    fi
    # a file that has its name is complete
    if [ -e "$work/o.npy" ]; then
        cmp "$work/whole.npy" "$work/o.npy" || whole=false
        rm -f "$work/o.npy"
    fi
done
echo "# $kills kills, $finished runs finished in between"
check "killed 20 times" test "$kills" -ge 20
check "nothing wrong or half-written appeared in between" $whole
exits 0 "the last run goes on to the end" run "$@" --out "$work/o.npy" --lse "$work/lse.npy" --spool "$spool"
check "the same bytes" same
check "no temporary file is left" test -z "$(find "$work" -name '.*.part' -o -name '*.tmp')"

# ---- Ctrl-C, then on
"$program" run "$@" --out "$work/o2.npy" --spool "$spool" >"$out" 2>"$err" &
child=$!
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    test -n "$(find "$spool" -name '*.piece' 2>/dev/null)" && break
    sleep 0.05
done
kill -TERM "$child"
wait "$child"
status=$?
if [ "$status" -ne 0 ]; then
    check "stopped: exit code 130" test "$status" -eq 130
    tells 'stopped; finished tasks are in .*spool: the same command goes on from there' "stopped: told"
    check "stopped: no output" test ! -e "$work/o2.npy" -a ! -e "$work/.o2.npy.part"
    exits 0 "and on" run "$@" --out "$work/o2.npy" --spool "$spool"
    tells 'finished tasks were taken over from the spool' "what was taken over is told"
fi
check "stopped and gone on: the same bytes" cmp "$work/whole.npy" "$work/o2.npy"

# ---- damage
exits 0 "--keep-spool" run "$@" --out "$work/o.npy" --lse "$work/lse.npy" --spool "$spool" --keep-spool
pieces=$(find "$spool" -name '*.piece' | sort)
check "the spool is kept" test -n "$pieces"
count=$(echo "$pieces" | wc -l)
echo "# $count pieces"
exits 0 "all is there" run "$@" --out "$work/o.npy" --lse "$work/lse.npy" --spool "$spool" --keep-spool
tells "attn: $count finished tasks were taken over" "every task is taken over"
check "the same bytes from the spool alone" same

nth() {
    echo "$pieces" | sed -n "$1p"
}

damaged() { # NAME TASKS PATTERN: runs with a damaged piece
    rm -f "$work/o.npy" "$work/lse.npy"
    exits 0 "$1" run --random "$problem$tokens" --workers 13 --threads 1 \
        --out "$work/o.npy" --lse "$work/lse.npy" --spool "$spool" --keep-spool
    tells "$3" "$1: told"
    tells "attn: $2 finished tasks" "$1: the others are taken over"
    check "$1: the same bytes" same
}

piece=$(nth 3)
size=$(wc -c <"$piece")
flip() { # FILE OFFSET: changes one byte
    byte=$(od -An -j"$2" -N1 -tu1 "$1" | tr -d ' ')
    # shellcheck disable=SC2059
    printf "\\$(printf %o $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}
flip "$piece" $((size - 1))
damaged "the last byte of a piece is changed" $((count - 1)) 'warning: .*is damaged: it is computed again'
flip "$piece" $((80 + $(random $((size - 80)))))
damaged "any byte of a piece is changed" $((count - 1)) 'warning: .*is damaged: it is computed again'
flip "$piece" "$(random 80)"
damaged "a byte of a piece's head is changed" $((count - 1)) 'warning: .*it is computed again'
head -c $((size / 2)) "$(nth 4)" >"$work/half" && cp "$work/half" "$piece"
damaged "a piece is cut off" $((count - 1)) 'warning: .*wrong length: it is computed again'
: >"$piece"
damaged "a piece is empty" $((count - 1)) 'warning: .*wrong length: it is computed again'
cp "$(nth 5)" "$piece"
damaged "a piece has another one's name" $((count - 1)) 'warning: .*computed again'
rm "$piece"
exits 0 "a piece is missing" run "$@" --out "$work/o.npy" --lse "$work/lse.npy" --spool "$spool" --keep-spool
check "a piece is missing: the same bytes" same

# ---- strangers
exits 4 "another seed" run "$@" --seed 1 --spool "$spool"
tells 'belongs to another problem: it has "data .*seed 0", this run is "data .*seed 1"' "another seed: told"
exits 4 "another W" run "$@" --workers 7 --spool "$spool"
tells 'belongs to another problem: it has "workers 13", this run is "workers 7"' "another W: told"
exits 4 "another problem" run --random "$problem$((tokens + 1))" --workers 13 --spool "$spool"
check "the strangers changed nothing" test "$(find "$spool" -name '*.piece' | wc -l)" -eq "$count"
exits 0 "the spool's own problem" run "$@" --out "$work/o.npy" --lse "$work/lse.npy" --spool "$spool"
check "the spool's own problem: the same bytes" same
: >"$work/file"
exits 4 "--spool names a file" run "$@" --spool "$work/file"

# ---- the contents of files are part of what a spool belongs to
exits 0 "inputs in files" run "$@" --save-inputs "$work/in" --out "$work/o.npy" --lse "$work/lse.npy"
set -- --causal --workers 13 --threads 1 --spool "$spool"
exits 0 "a spool of files" run --q "$work/in-q.npy" --k "$work/in-k.npy" --v "$work/in-v.npy" "$@" --keep-spool
cp "$work/in-v.npy" "$work/elsewhere.npy"
exits 0 "the same contents under another name" run --q "$work/in-q.npy" --k "$work/in-k.npy" \
    --v "$work/elsewhere.npy" "$@" --out "$work/o.npy" --keep-spool
tells "attn: $count finished tasks" "the same contents: taken over"
check "the same contents: the same bytes" cmp "$work/whole.npy" "$work/o.npy"
flip "$work/elsewhere.npy" 4321
exits 4 "one changed byte of v" run --q "$work/in-q.npy" --k "$work/in-k.npy" --v "$work/elsewhere.npy" "$@"
tells 'belongs to another problem: it has "data files' "one changed byte of v: told"
finish
