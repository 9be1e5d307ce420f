#!/usr/bin/env bash
# All checks: lint, format, types, tests. One command on a fresh machine.
#   bash scripts/test.sh [PYTEST ARGUMENT...]
# MUST_RUN=1, in .ci/run, also tests the oldest torch and, by turns, another Python:
# scripts/test_versions.sh.
# THOROUGH=1 tries all combinations of settings (see tests/combinations.py), in twice the time.
# The first run makes .venv and installs into it; see scripts/venv.sh for the settings.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

turn="$(git rev-list --count HEAD 2> /dev/null || true)"
versions() { [ -z "${MUST_RUN:-}" ] || TURN="$turn" nice bash scripts/test_versions.sh "$@"; }

log="$(mktemp)"
trap 'rm -rf "$log" .venv/cache' EXIT
[ -z "${MUST_RUN:-}" ] || export FLATSHARD_CACHE="${FLATSHARD_CACHE:-$PWD/.venv/cache}"
# Byte code is made of what the tests import, and not of everything that is installed.
PIP_COMPILE=0 setup accelerate dev docs examples lightning models optimizers transformers trl tutorials
# One file more at a time than cores, since ranks wait for one another, and two more take longer;
# the longest files begin first. Counted before nproc is told that there is one thread.
workers=$(($(nproc) < 8 ? $(nproc) + 1 : 8))
# Several ranks share the cores: one thread each.
export OMP_NUM_THREADS=1
# Each rank's process imports the tests: that they are compiled once is a part of the time.
unset PYTHONDONTWRITEBYTECODE
# The environments of other versions are made beside the tests.
versions install > "$log" 2>&1 &
installing=$!
"$python" -m ruff check
"$python" -m ruff format --check
# Beside the tests, whose ranks wait for each other now and then.
"$python" -m mypy &
types=$!
failed=0
"$python" -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder "$@" || failed=$?
wait "$types"
wait "$installing" || cat "$log"
versions || failed=$?
exit "$failed"
