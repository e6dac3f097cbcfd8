#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python.sh - the tests of the Python package, by the first Python that has what they need.
#
# usage: python.sh LIBRARY [PYTEST-ARGUMENT...]     PYTHON=... takes that one
set -eu
ATTN_LIBRARY=$(realpath "$1")
export ATTN_LIBRARY
shift
cd "$(dirname "$0")/.."

needs="numpy, pytest, hypothesis"
for python in ${PYTHON:-python3 /usr/bin/python3}; do
    if command -v "$python" >/dev/null 2>&1 && "$python" -c "import $needs" 2>/dev/null; then
        PYTHONDONTWRITEBYTECODE=1 exec "$python" -m pytest -q -p no:cacheprovider "$@" python/tests
    fi
done
echo "skipped: no Python here has $needs (script/bootstrap --test installs them)"
exit 77
