#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# --help, the manual pages and the completion scripts name the same options: all come from one table.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

"$program" --help >"$out"
# a verb of two words as "bench-cqs", the name of its manual page
verbs=$(sed -n '/^Verbs:/,/^$/s/^  \([a-z]\{1,\}\( [a-z]\{1,\}\)\{0,1\}\)  .*/\1/p' "$out" | tr ' ' -)
check "attn --help lists the verbs" test "$(echo "$verbs" | wc -w)" -ge 8

for verb in $verbs; do
    words=$(echo "$verb" | tr - ' ')
    # shellcheck disable=SC2086 # one or two words
    {
        "$program" $words --help >"$work/help"
        "$program" help $words >"$work/long"
        "$program" help --man $words >"$work/man"
    }
    sed -n 's/^ \{2,6\}\(-[a-z], \)\{0,1\}--\([a-z-]*\).*/\2/p' "$work/help" | sort >"$work/options"
    check "$verb: --help lists options" test -s "$work/options"
    head -n "$(wc -l <"$work/help")" "$work/long" >"$work/long_head"
    check "$verb: attn help begins with --help" cmp "$work/help" "$work/long_head"
    sed -n 's/^\(\\fB\\-[a-z]\\fR, \)\{0,1\}\\fB\\-\\-\([^ ]*\)\\fR.*/\2/p' "$work/man" | sed 's/\\-/-/g' |
        sort >"$work/man_options"
    check "$verb: the manual page has the same options" diff "$work/options" "$work/man_options"
    check "$verb: the manual page has a name" grep -q '^attn.* \\- ' "$work/man"
    for shell in bash zsh fish; do
        "$program" completion "$shell" >"$work/$shell"
    done
    # bash: the words of the verb; fish: its lines; zsh: its branch
    sed -n "/^    $verb)/,/words=/p" "$work/bash" | sed -n "s/.*words='\(.*\)'.*/\1/p" | tr ' ' '\n' |
        sed -n 's/^--//p' | sort >"$work/found"
    check "$verb: bash completes the same options" diff "$work/options" "$work/found"
    sed -n "s/.*seen_subcommand_from ${words##* }' -l \([a-z-]*\).*/\1/p" "$work/fish" | sort >"$work/found"
    check "$verb: fish completes the same options" diff "$work/options" "$work/found"
    sed -n "/^    $verb)/,/;;/p" "$work/zsh" | sed -n "s/^ *'\**--\([a-z-]*\).*/\1/p" | sort >"$work/found"
    check "$verb: zsh completes the same options" diff "$work/options" "$work/found"
    if command -v groff >/dev/null; then
        groff -man -ww -z -Tascii "$work/man" 2>"$work/groff"
        check "$verb: groff has nothing to say about the manual page" test ! -s "$work/groff"
    fi
    # every option of --help is taken (help itself aside)
    while read -r option; do
        case $option in help) continue ;; esac
        # shellcheck disable=SC2086 # one or two words
        "$program" $words --help "--$option" >"$out" 2>"$err" </dev/null
        if grep -q 'unknown option' "$err"; then
            result 1 "$verb: --$option of --help is unknown"
        fi
    done <"$work/options"
done

"$program" help --man >"$work/man"
for verb in $verbs; do
    check "attn.1 lists $verb" grep -q "^\.B $(echo "$verb" | tr - ' ')\$" "$work/man"
done
if command -v bash >/dev/null; then
    check "bash reads its completion script" bash -n "$work/bash"
    # shellcheck disable=SC2016
    complete='. "$1"; COMP_WORDS=(attn plan --format ""); COMP_CWORD=3; _attn; echo "${COMPREPLY[@]}"'
    check "bash: values of --format" test "$(bash -c "$complete" bash "$work/bash")" = "table md csv json jsonl"
    # shellcheck disable=SC2016
    complete='. "$1"; COMP_WORDS=(attn pl); COMP_CWORD=1; _attn; echo "${COMPREPLY[@]}"'
    check "bash: verbs" test "$(bash -c "$complete" bash "$work/bash")" = "plan"
    # shellcheck disable=SC2016
    complete='. "$1"; COMP_WORDS=(attn plan --work); COMP_CWORD=2; _attn; echo "${COMPREPLY[@]}"'
    check "bash: options" test "$(bash -c "$complete" bash "$work/bash")" = "--workers"
    # shellcheck disable=SC2016
    complete='. "$1"; COMP_WORDS=(attn bench ""); COMP_CWORD=2; _attn; echo "${COMPREPLY[@]}"'
    check "bash: second words" test "$(bash -c "$complete" bash "$work/bash")" = "attention cqs --help"
    # shellcheck disable=SC2016
    complete='. "$1"; COMP_WORDS=(attn bench cqs --tok); COMP_CWORD=3; _attn; echo "${COMPREPLY[@]}"'
    check "bash: options behind them" test "$(bash -c "$complete" bash "$work/bash")" = "--tokens"
fi
if command -v zsh >/dev/null; then
    check "zsh reads its completion script" zsh -n "$work/zsh"
fi
if command -v fish >/dev/null; then
    check "fish reads its completion script" fish -n "$work/fish"
fi

# lines fit the width asked for
COLUMNS=60 "$program" plan --help >"$out"
check "--help wraps at COLUMNS" test "$(sed -n '/^The problem/,$p' "$out" | awk 'length > 60' | wc -l)" -eq 0
finish
