# Sourced by demo.sh and test.sh: `setup EXTRA...` makes the virtual environment, installs flatshard
# there with the named extras, and sets `python`. What is up to date is not done again.
#   FLATSHARD_VENV   where the environment is (default: .venv in the repository)
#   FLATSHARD_TORCH  the torch to install, such as "torch==2.13.0" (default: what pyproject.toml says)
#   PYTHON           the Python that makes it (default: python3)

setup() {
    local venv="${FLATSHARD_VENV:-.venv}" base="${PYTHON:-python3}" extra missing=""
    # A change of any of these makes an extra's stamp out of date.
    local key
    key="$(cksum < pyproject.toml) $PWD ${FLATSHARD_TORCH:-}"
    python="$venv/bin/python"

    if [ ! -x "$venv/bin/pip" ]; then
        "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "error: $base must be Python 3.11 or newer; set PYTHON to one" >&2
            exit 1
        }
        echo "Making $venv" >&2
        "$base" -m venv "$venv"
    fi
    for extra in "$@"; do
        [ "$(cat "$venv/.flatshard-$extra" 2>/dev/null)" = "$key" ] || missing="$missing,$extra"
    done
    if [ -n "$missing" ]; then
        echo "Installing flatshard[${missing#,}] in $venv" >&2
        "$python" -m pip install --quiet ${FLATSHARD_TORCH:+"$FLATSHARD_TORCH"} \
            --editable ".[${missing#,}]"
        for extra in "$@"; do
            echo "$key" > "$venv/.flatshard-$extra"
        done
    fi
}
