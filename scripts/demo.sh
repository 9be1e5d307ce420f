#!/usr/bin/env bash
# Trains the MNIST network on two sharded ranks: one command on a fresh machine.
#   bash scripts/demo.sh [OPTION...]    options of scripts/train_mnist.py; the last one given wins
# The first run makes .venv and installs into it; see scripts/venv.sh for the settings.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

setup examples
exec "$python" scripts/train_mnist.py --world-size 2 --epochs 4 "$@"
