# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# steps.sh - steps that pass, fail or are skipped, and their count, for script/test and script/test-gpu; read it
# after common.sh.

mkdir -p build/test
passed=0
failed=0
skipped=0
failures=

title()
{
    printf '\n==== %s (%s s)\n' "$1" "$(($(date +%s) - begun))"
}

# step NAME COMMAND...: one thing that passes, fails, or (exit 77) is skipped
step()
{
    step_name=$1
    shift
    "$@" >"build/test/log" 2>&1
    step_code=$?
    case $step_code in
    0)
        passed=$((passed + 1))
        echo "ok       $step_name: $(tail -n 1 build/test/log)"
        ;;
    77)
        skipped=$((skipped + 1))
        echo "SKIPPED  $step_name: $(tail -n 1 build/test/log)"
        ;;
    *)
        failed=$((failed + 1))
        failures="$failures
    $step_name"
        tail -n 60 build/test/log
        echo "FAILED   $step_name"
        ;;
    esac
    return "$step_code"
}

# build PRESET CMAKE-OPTION...: configure and build; the flavour's tests make sense only if this passes
build()
{
    preset=$1
    shift
    step "configure $preset" configure "$preset" "$@" &&
        step "build $preset" cmake --build --preset "$preset" --parallel "$(cores)"
}

# no_gpu PROGRAM ARGUMENTS...: says loudly why a program of the GPU tests skips them, and is false where it does not
no_gpu()
{
    gpu_reason=$("$@" 2>/dev/null | sed -n 's/^GPU tests skipped: //p')
    [ -n "$gpu_reason" ] || return 1
    printf '\n********  GPU TESTS SKIPPED: %s  ********\n' "$gpu_reason"
}

finish()
{
    printf '\n'
    [ -z "$failures" ] || printf 'failed:%s\n' "$failures"
    printf '%s seconds\n' "$(($(date +%s) - begun))"
    if [ "$skipped" -gt 0 ]; then
        echo "$passed passed, $failed failed, $skipped skipped"
    else
        echo "$passed passed, $failed failed"
    fi
    [ "$failed" -eq 0 ]
    exit
}

begun=$(date +%s)
