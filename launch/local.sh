#!/usr/bin/env bash
# Trains the default run on this machine into runs/quickstart: launch/local.sh [flags of
# dapo_jax.train], such as
#     launch/local.sh --config.rl.steps=20 --workdir=runs/short
# Makes .venv first if there is none; PYTHON names the interpreter to make it from. All fields of
# the configuration: .venv/bin/python -m dapo_jax.train --help
#   --dry-run    print the command and run nothing
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

dry=no flags=()
for argument in "$@"; do
    case "$argument" in
        --help) show_help; exit 0 ;;
        --dry-run) dry=yes ;;
        *) flags+=("$argument") ;;
    esac
done
[ "$dry" = yes ] || prepare_to_run
cd "$root"
run=("$python" -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart)
run+=(${flags[@]+"${flags[@]}"})
[ "$dry" = no ] || { perform "${run[@]}"; exit 0; }
exec "${run[@]}"
