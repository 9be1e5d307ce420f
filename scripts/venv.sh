# Sourced by demo.sh and test.sh: `setup EXTRA...` makes the virtual environment, installs flatshard
# there with the named extras, and sets `python`. What is up to date is not done again.
#   FLATSHARD_VENV   where the environment is (default: .venv in the repository)
#   FLATSHARD_TORCH  the torch to install, such as "torch==2.13.0" (default: what pyproject.toml says)
#   PYTHON           the Python that makes it (default: python3)
#   FLATSHARD_CACHE  a folder for unpacked wheels, which environments share (default: none is kept)

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
        install "$venv" ${FLATSHARD_TORCH:+"$FLATSHARD_TORCH"} --editable ".[${missing#,}]"
        for extra in "$@"; do
            echo "$key" > "$venv/.flatshard-$extra"
        done
    fi
}

# install VENV ARGUMENT...: as `pip install ARGUMENT...` does, with uv, which unpacks on all cores and
# takes half the time. uv reads the settings of pip from the environment here. Where uv cannot be
# installed, or fails, pip installs, but not on a full disk.
install() {
    local venv="$1" python="$1/bin/python" uv=.venv/bin/uv full="no space left" said
    shift
    said="$(mktemp)"
    (
        if [ ! -x "$uv" ]; then
            "$python" -m pip install --quiet uv
            uv="$venv/bin/uv"
        fi
        while IFS='=' read -r name value; do
            value="${value:1:-1}"
            case "${name##*.}" in
                cert) export SSL_CERT_FILE="$value" ;;
                constraint) export UV_CONSTRAINT="$value" ;;
                default-timeout | timeout) export UV_HTTP_TIMEOUT="$value" ;;
                extra-index-url) export UV_INDEX="$value" ;;
                find-links) export UV_FIND_LINKS="${value// /,}" ;;
                index-url) export UV_DEFAULT_INDEX="$value" ;;
            esac
        done < <("$python" -m pip config list)
        export UV_CACHE_DIR="${FLATSHARD_CACHE:-$venv/uv-cache}" UV_INDEX_STRATEGY=unsafe-best-match
        [ -n "${FLATSHARD_CACHE:-}" ] || trap 'rm -rf "$UV_CACHE_DIR"' EXIT
        "$uv" pip install --quiet --python "$python" "$@"
    ) 2> "$said" ||
        { ! grep -qi "$full" "$said" && "$python" -m pip install --quiet "$@" 2>> "$said"; } || {
        cat "$said" >&2
        if grep -qi "$full" "$said"; then
            echo "error: the disk of $venv is full: torch and its CUDA libraries take 6 GB;" \
                "free are $(df -h --output=avail "$venv" | sed '1d; s, ,,g')" >&2
        elif grep -qiE "connect|resolv|timed out" "$said"; then
            echo "error: $venv cannot be installed, because no package index answers" >&2
        fi
        return 1
    }
    rm "$said"
}
