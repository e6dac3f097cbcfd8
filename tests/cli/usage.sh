#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Usage errors: each with its message on stderr, nothing on stdout, and exit code 2.
# shellcheck source=tests/cli/tap.inc
. "$(dirname "$0")/tap.inc"

refused() { # PATTERN ARGUMENT...
    pattern=$1
    shift
    exits 2 "attn $* is refused" "$@"
    tells "$pattern" "attn $* tells why"
    check "attn $* prints no data" test ! -s "$out"
}

exits 2 "no verb"
tells 'Usage: attn VERB' "no verb: the usage on stderr"
exits 0 "attn --help" --help
prints '^Usage: attn VERB' "attn --help: on stdout"
exits 0 "attn -h" -h
exits 0 "attn --version" --version
prints '^attn [0-9]+\.[0-9]+\.[0-9]+$' "attn --version: the version"
prints '[+-]cairo' "attn --version: what the build has"
for verb in plan info help completion; do
    exits 0 "attn $verb --help" "$verb" --help
    prints "^Usage: attn $verb" "attn $verb --help: on stdout"
    check "attn $verb --help: nothing on stderr" test ! -s "$err"
    exits 0 "attn $verb -h" "$verb" -h
done

refused "unknown verb 'paln': did you mean 'plan'" paln
refused "unknown verb 'xyzzy'" xyzzy
refused "unknown option '--versoin'" --versoin
refused 'unknown option --token: did you mean --tokens' plan --token 10
refused 'unknown option --wrokers: did you mean --workers' plan --wrokers=7
refused 'unknown option --xyzzy' plan --xyzzy
refused 'unknown option -x' plan -x
refused "'10'.*takes options only" plan 10
refused "'--workers'.*takes options only" plan -- --workers
refused 'needs a word: bash, zsh or fish' completion
refused 'it must be bash, zsh or fish' completion tcsh
refused 'one word too many' completion bash zsh
refused "unknown verb 'pln': did you mean 'plan'" help pln

refused '--workers needs a value' plan --workers
refused '--causal takes no value' plan --workers 7 --causal=yes
refused "--workers '': it is not a number" plan --workers=
refused "--kernel '': the value is empty" plan --workers 7 --kernel ""
refused '--workers 0: it must be at least 1' plan --workers 0
refused '--workers -7: it must be at least 1' plan --workers -7
refused '--workers 7x: ' plan --workers 7x
refused '--workers 7,,8: it is not a number' plan --workers 7,,8
refused '--workers 7,: it is not a number' plan --workers 7,
refused '--workers 9-4: the range ends before it begins' plan --workers 9-4
refused '--workers 1-100\*1: a range with \*' plan --workers '1-100*1'
refused '--workers 1-100\+0: a range with \+' plan --workers 1-100+0
refused '--workers 1-2000000000: the list is too long' plan --workers 1-2000000000
refused '--tokens 0: it must be at least 1' plan --workers 7 --tokens 0
refused '--tokens 99999999999999999999: it is too large' plan --workers 7 --tokens 99999999999999999999
refused '--tokens 9999999999G: it is too large' plan --workers 7 --tokens 9999999999G
refused '--tokens 10 000: ' plan --workers 7 --tokens '10 000'
refused '--tokens 1\.5k: ' plan --workers 7 --tokens 1.5k
refused '--dim 513: it must be at most 512' plan --workers 7 --dim 513
refused '--dim -1: it must be at least 1' plan --workers 7 --dim -1
refused '--dtype f64: it must be f32, f16 or bf16' plan --workers 7 --dtype f64
refused '--format xml: it must be table, md, csv, json or jsonl' plan --workers 7 --format xml
refused '--mem-limit -1: it must not be negative' plan --tokens 100 --mem-limit -1
refused '--mem-limit 0: it must be at least 1' plan --tokens 100 --mem-limit 0
refused '--mem-limit 2GB1: ' plan --tokens 100 --mem-limit 2GB1
refused '--mem-limit 99999999TiB: it is too large' plan --tokens 100 --mem-limit 99999999TiB
refused '--mem-limit 1\.MiB: digits' plan --tokens 100 --mem-limit 1.MiB
refused '--seconds nan: it must be finite' plan --search 8 --seconds nan
refused '--seconds -1: it must be from 0' plan --search 8 --seconds -1
refused '--seconds 1s: it is not a number' plan --search 8 --seconds 1s
refused '--rank 7: the workers are 0 to 6' plan --workers 7 --rank 7
refused '--rank -1: ' plan --workers 7 --rank -1

refused 'give --workers' plan
refused 'give --workers' plan --tokens 10
refused 'give --tokens' plan --mem-limit 1GiB
refused 'does not cover Z_7.*\(2, 3, 4, 5\)' plan --workers 7 --interest-set 0,1
refused 'heads' plan --workers 7 --heads 4 --kv-heads 3
refused '--window takes two numbers' plan --workers 7 --window 5
refused '--causal lets no query see a later key' plan --workers 7 --causal --window 5,5
refused '--rectangle A belongs to --quorum rectangular' plan --workers 7 --rectangle 2
refused '--interest-set belongs to --quorum cyclic' plan --workers 7 --quorum auto --interest-set 0,1,3
refused 'belong to --search' plan --workers 7 --size 3
refused '--prove needs one case' plan --workers 7,8 --prove
refused 'no kernel|unknown kernel|kernel' plan --workers 7 --kernel nonesuch
refused 'limit' plan --tokens 1M --workers 3 --mem-limit 1k
refused 'one table' plan --workers 7 --cost --prove --format csv
refused '--picture p.gif: the name must end in .svg or .png' plan --workers 7 --picture p.gif
refused '--picture - draws among the text' plan --workers 7 --picture - --format json

exits 0 "--name=value" plan --workers=7 --tokens=10
exits 0 "a value that begins with a minus sign" plan --workers 7 --tokens 10 --window -1,0
exits 0 "suffixes" plan --workers 4 --tokens 10k --mem-limit 1.5GiB
finish
