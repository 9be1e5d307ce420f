#!/usr/bin/env bash
# The core tests with the oldest and newest torch and Python that flatshard is for.
#   bash scripts/test_versions.sh [PYTEST ARGUMENT...]
# VERSIONS chooses the pairs PYTHON:TORCH (a torch left out is the newest). Each has an environment
# of its own, .venv/PYTHON-TORCH. A pair that fails does not keep the others from being tested; one
# whose Python is not installed is left out, and named at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

export OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- -x tests/units tests/tensor tests/engine tests/parity
failed="" missing=""
for pair in ${VERSIONS:-3.11:2.11.0 3.11:2.13.0 3.11: 3.13:}; do
    version="${pair%%:*}" torch="${pair#*:}"
    if ! command -v "python$version" > /dev/null; then
        missing+=" $pair"
        continue
    fi
    echo "== Python $version, torch ${torch:-newest}"
    # In a shell of its own: an installation that fails ends it.
    (
        set -e
        PYTHON="python$version" FLATSHARD_TORCH="${torch:+torch==$torch}"
        FLATSHARD_VENV=".venv/$version-${torch:-newest}"
        setup dev
        "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
    ) || failed+=" $pair"
done
[ -z "$missing" ] || echo "not tested, Python is not installed:$missing" >&2
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
