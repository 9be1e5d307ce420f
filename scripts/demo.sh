#!/usr/bin/env bash
# Trains the MNIST network on two sharded ranks: one command on a fresh machine.
#   bash scripts/demo.sh [OPTION...]    options of scripts/train_mnist.py; the last one given wins
# The first run makes .venv and installs into it; see scripts/venv.sh for the settings.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

setup examples
# Each rank gets half of the cores. Without this setting, torchrun gives it one.
cores="$("$python" -c 'import os; print(os.cpu_count() or 2)')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((cores + 1) / 2))}"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    scripts/train_mnist.py --epochs 4 "$@"
