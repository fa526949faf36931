#!/usr/bin/env bash
# Trains the default run on this machine: launch/local.sh [flags of dapo_jax.train]
# Makes .venv first if there is none; PYTHON names the interpreter to make it from.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_to_run
cd "$root"
exec "$python" -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
