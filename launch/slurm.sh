#!/usr/bin/env bash
# Submits a training run to SLURM: launch/slurm.sh [options] [flags of dapo_jax.train], such as
#     launch/slurm.sh --nodes=4 --tasks-per-node=8 --gpus --config=FILE --workdir=/shared/run
# The job is launch/slurm.sbatch; its text says how it saves, leaves and goes on. Call this from
# a folder that all nodes see, after launch/local.sh has made .venv there once. What the processes
# print goes to WORKDIR/slurm-JOB.out.
#   --nodes=N             nodes (default 1)
#   --tasks-per-node=K    processes on each (default 1); with GPUs, as many as there are GPUs
#   --gpus                each process has one GPU: sbatch --gpus-per-task=1, flags of gpu
#   --platform=P          flags for XLA: cpu, gpu, gpu-deterministic or tpu
#   --time=T              time limit, as sbatch --time (default 24:00:00)
#   --leave=S             seconds before the limit at which the run saves and leaves (default 300)
#   --requeues=K          times that the job is queued again when it has not finished (default 20)
#   --sbatch=OPTION       a further option of sbatch, such as --sbatch=--partition=long; repeatable
#   --dry-run             print the command and submit nothing
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

dry=no nodes=1 tasks=1 time=24:00:00 leave=300 requeues=20 platform=cpu workdir="" options=()
flags=()
for argument in "$@"; do
    case "$argument" in
        --help) show_help; exit 0 ;;
        --dry-run) dry=yes ;;
        --nodes=*) nodes="${argument#*=}" ;;
        --tasks-per-node=*) tasks="${argument#*=}" ;;
        --gpus) options+=(--gpus-per-task=1); platform=gpu ;;
        --platform=*) platform="${argument#*=}" ;;
        --time=*) time="${argument#*=}" ;;
        --leave=*) leave="${argument#*=}" ;;
        --requeues=*) requeues="${argument#*=}" ;;
        --sbatch=*) options+=("${argument#--sbatch=}") ;;
        --cluster=*) refuse "$argument is set by the job" ;;
        --workdir=* | --out=*) workdir="${argument#*=}"; flags+=("$argument") ;;
        -*) flags+=("$argument") ;;
        *) refuse "'$argument' is no flag" ;;
    esac
done
[ -n "$workdir" ] || refuse "--workdir=DIR is missing, on a shared disk"
for each in "$nodes" "$tasks"; do number "$each" 1; done
for each in "$leave" "$requeues"; do number "$each" 0; done
(platform_flags "$platform") # in the job it would be refused only when its time has come
settings=("DAPO_JAX_PLATFORM=$platform" "DAPO_JAX_REQUEUES=$requeues")
[ -z "${DAPO_JAX_MODULE:-}" ] || settings+=("DAPO_JAX_MODULE=$DAPO_JAX_MODULE")
[[ "$workdir" = /* ]] || workdir="$root/$workdir"
perform mkdir -p "$workdir" # sbatch makes no folder for its --output
perform env "${settings[@]}" sbatch --nodes="$nodes" --ntasks-per-node="$tasks" --time="$time" \
    --signal="TERM@$leave" --chdir="$root" --output="$workdir/slurm-%j.out" ${options[@]+"${options[@]}"} \
    "$root/launch/slurm.sbatch" "${flags[@]}"
