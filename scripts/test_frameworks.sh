#!/usr/bin/env bash
# The integrations with the oldest versions of their frameworks that flatshard is for; the newest
# ones are in scripts/test.sh.
#   bash scripts/test_frameworks.sh [PYTEST ARGUMENT...]
# Makes .venv/oldest-frameworks, see scripts/venv.sh for its settings.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

FLATSHARD_VENV=.venv/oldest-frameworks
setup accelerate dev lightning transformers trl
"$python" -m pip install --quiet "accelerate==1.14.0" "lightning==2.6.0" "transformers==5.2.0"
export OMP_NUM_THREADS=1
exec "$python" -m pytest -q tests/integrations "$@"
