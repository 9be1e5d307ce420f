#!/usr/bin/env bash
# Tests of checkpoints, state, parity and the quickstart, on each Python from 3.11 that the machine
# has, and on the oldest torch. Each version runs the tests with the mark `versions`, and a part of
# the others; with THOROUGH=1, all. The newest torch on the Python of .venv is left out, because
# scripts/test.sh runs all tests there.
#   bash scripts/test_versions.sh [PYTEST ARGUMENT...]
#   bash scripts/test_versions.sh install    # only make the environments
# TURN      a number: of the Pythons with the newest torch, only one is tested, by turns
# VERSIONS  the pairs PYTHON:TORCH to test instead (no torch: the newest)
# PAGE      a page whose table of versions is replaced by what ran, such as docs/evidence.md
# Each pair has an environment in .venv/versions. The pairs are tested side by side. A pair whose
# Python the machine lacks is named at the end; a pair that cannot be installed has failed.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

OLDEST="$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)"
export OMP_NUM_THREADS=1
folder=.venv/versions
mkdir -p "$folder"

# python_of VERSION: prints the Python of this version, such as 3.13.
python_of() {
    local found pyenv
    pyenv="$(pyenv root 2> /dev/null || echo "$HOME/.pyenv")"
    for found in "python$1" "$pyenv/versions/$1."*/bin/python; do
        # Run each, because the commands of pyenv on PATH also exist for versions that fail.
        if "$found" -c "import ensurepip, sys; sys.exit(sys.version_info[:2] != (${1/./, }))" 2> /dev/null
        then
            echo "$found"
            return
        fi
    done
    return 1
}

# test_pair PAIR [ARGUMENT...]: makes the environment of a pair, and runs the tests unless the only
# argument is "install". Writes a row of the table.
test_pair() {
    local pair="$1" torch="${1#*:}" python
    shift
    PYTHON="$(python_of "${pair%%:*}")" FLATSHARD_TORCH="${torch:+torch==$torch}"
    FLATSHARD_VENV="$folder/${pair%%:*}-${torch:-newest}"
    setup versions
    [ "$*" != install ] || return 0
    "$python" -m pytest -q -p no:cacheprovider -p no:xdist "$@" | tee "$folder/said-$pair"
    "$python" -c 'import sys, torch; print(f"| {sys.version.split()[0]} | {torch.__version__} |", end=" ")' \
        > "$folder/row-$pair"
    tail -n 1 "$folder/said-$pair" | sed 's/ in [0-9].*/ |/' >> "$folder/row-$pair"
}

here="$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)"
if [ -z "${VERSIONS:-}" ]; then
    others=()
    for version in 3.11 3.12 3.13 3.14; do
        [ "$version" = "$here" ] && [ -z "${PAGE:-}" ] || others+=("$version:")
    done
    if [ -n "${TURN:-}" ]; then
        there=()
        for pair in "${others[@]}"; do
            ! python_of "${pair%:}" > /dev/null || there+=("$pair")
        done
        others=(${there:+"${there[TURN % ${#there[@]}]}"})
    fi
    VERSIONS="3.11:$OLDEST.0 ${others[*]}"
fi
parts=1
if [ $# -eq 0 ]; then
    set -- tests/checkpoint tests/state tests/parity tests/tutorials/test_documents.py::test_quickstart
    [ -n "${THOROUGH:-}" ] || parts=24
fi

rm -f "$folder"/row-* "$folder"/said-*
failed="" missing="" pairs=()
for pair in $VERSIONS; do
    if ! python_of "${pair%%:*}" > /dev/null; then
        missing+=" $pair"
        continue
    fi
    # One after another, because later ones use wheels that earlier ones have unpacked.
    (set -e; test_pair "$pair" install) &
    wait $! && pairs+=("$pair") || failed+=" $pair (installation)"
done
if [ "$*" != install ]; then
    running=()
    for pair in "${pairs[@]}"; do
        # The numbers differ, so that versions run different parts.
        (set -e; SAMPLE="${#running[@]}/$parts"; export SAMPLE
            # Its one measure takes as long as all else here. What it counts depends on torch, and
            # not on Python: scripts/test.sh has run all of it on the newest torch.
            [ "$parts" = 1 ] || [ -n "${pair#*:}" ] || set -- "$@" --ignore=tests/parity/test_costs.py
            test_pair "$pair" "$@") > "$folder/log-$pair" 2>&1 &
        running+=($!)
    done
    for number in "${!running[@]}"; do
        wait "${running[$number]}" || failed+=" ${pairs[$number]}"
        echo "== Python and torch ${pairs[$number]}"
        cat "$folder/log-${pairs[$number]}"
    done
    table="| Python | torch | tests |
|---|---|---|
$(cat "$folder"/row-* 2> /dev/null)"
    echo "$table"
    [ -z "${PAGE:-}" ] || .venv/bin/python -c '
import pathlib, sys
sys.path.append("scripts")
from evidence import replaced
page = pathlib.Path(sys.argv[1])
page.write_text(replaced(page.read_text(), "versions", sys.argv[2]))' "$PAGE" "$table"
fi
[ -z "$missing" ] || echo "not tested, because this machine has no such Python:$missing"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
