#!/usr/bin/env bash
# Builds the pages in docs/ as a site in build/site; a link that leads nowhere is an error.
#   bash scripts/docs.sh            then open build/site/index.html
#   bash scripts/docs.sh serve      at http://127.0.0.1:8000, where it can be searched
# Makes .venv, see scripts/venv.sh for its settings.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

setup docs
export NO_MKDOCS_2_WARNING=1
exec "$python" -m mkdocs "${1:-build}"
