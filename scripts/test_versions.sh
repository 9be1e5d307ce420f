#!/usr/bin/env bash
# scripts/test.sh with the oldest and the newest torch, and with Python 3.11 and 3.13.
#   bash scripts/test_versions.sh [PYTEST ARGUMENT...]
# VERSIONS chooses the pairs PYTHON:TORCH (a torch left out is the newest). Each has an environment
# of its own, .venv/PYTHON-TORCH. A pair that fails does not keep the others from being tested.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=""
for pair in ${VERSIONS:-3.11:2.11.0 3.11: 3.13:}; do
    version="${pair%%:*}" torch="${pair#*:}"
    echo "== Python $version, torch ${torch:-newest}"
    PYTHON="python$version" FLATSHARD_TORCH="${torch:+torch==$torch}" \
        FLATSHARD_VENV=".venv/$version-${torch:-newest}" bash scripts/test.sh "$@" ||
        failed+=" $pair"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
