#!/usr/bin/env bash
# Trains the default run on this machine into runs/quickstart: launch/local.sh [flags of
# dapo_jax.train], such as
#     launch/local.sh --config.rl.steps=20 --workdir=runs/short
# Makes .venv first if there is none; PYTHON names the interpreter to make it from. All fields of
# the configuration: .venv/bin/python -m dapo_jax.train --help
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [ "${1:-}" = --help ]; then show_help; exit 0; fi
prepare_to_run
cd "$root"
exec "$python" -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
