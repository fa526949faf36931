#!/usr/bin/env bash
# Submits a sweep to SLURM as an array, a task for each setting: launch/sweep.sh [options] [flags of
# dapo_jax.sweep], such as
#     launch/sweep.sh --parallel=4 --gpus --config=FILE --out=/shared/DIR
# Settings are checked and counted here first. Submitted again with the same DIR, finished ones end
# at once and the others go on. When all are over, `python -m dapo_jax.sweep` with the same flags and
# --table writes the table.
#   --parallel=K     tasks of the array that run at the same time (default 8)
#   --dry-run        print the command and submit nothing
# All other options of launch/slurm.sh (--time, --gpus, --sbatch=OPTION, ...) hold for each task.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

parallel=8 out="" options=() flags=()
for argument in "$@"; do
    case "$argument" in
        --help) show_help; exit 0 ;;
        --parallel=*) parallel="${argument#*=}" ;;
        --dry-run | --nodes=* | --tasks-per-node=* | --gpus | --platform=* | --time=* | --leave=* | \
            --requeues=* | --sbatch=*) options+=("$argument") ;;
        --index=* | --table) refuse "$argument is not for a job; call dapo_jax.sweep" ;;
        --out=*) out="${argument#*=}"; flags+=("$argument") ;;
        -*) flags+=("$argument") ;;
        *) refuse "'$argument' is no flag" ;;
    esac
done
[ -n "$out" ] || refuse "--out=DIR is missing, on a shared disk"
[[ "$parallel" =~ ^[1-9][0-9]*$ ]] || refuse "--parallel=$parallel is no number above 0"
listed="$("${PYTHON_OF_RUN:-$python}" -m dapo_jax.sweep "${flags[@]}" --dry-run)"
last=$(($(wc -l <<<"$listed") - 1))
export DAPO_JAX_MODULE=dapo_jax.sweep
exec "$root/launch/slurm.sh" ${options[@]+"${options[@]}"} "--sbatch=--array=0-$last%$parallel" \
    "${flags[@]}"
