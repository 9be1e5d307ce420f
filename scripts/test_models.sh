#!/usr/bin/env bash
# Real models of timm, torchvision and transformers, against DistributedDataParallel.
#   bash scripts/test_models.sh [ARGUMENT OF test_models.py...] > docs/models.md
# Makes .venv, see scripts/venv.sh for its settings.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

setup models
export OMP_NUM_THREADS=1
exec "$python" scripts/test_models.py "$@"
