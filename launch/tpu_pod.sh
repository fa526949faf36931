#!/usr/bin/env bash
# Trains on a Cloud TPU slice, one process a host: launch/tpu_pod.sh ACTION [options] [flags of
# dapo_jax.train]. Not run here: it was checked by shellcheck and --dry-run alone.
#   create       make the slice now          queue     ask for it as a queued resource, and return
#   status       of the queued resource      setup     copy the code to all hosts, install
#   train        run on all hosts; SIGTERM or maintenance: it saves, call train again to go on
#   stop         SIGTERM to the run, which saves and which train does not start again
#   delete       give the slice back
# Options, each with the variable that gives its default:
#   --name=N        TPU_NAME          --zone=Z      ZONE        --project=P   PROJECT (gcloud's own)
#   --accelerator=A ACCELERATOR       --runtime=V   RUNTIME     --spot        may be taken away
#   --restarts=K    train again up to K times where it ends with 143 or a host fails (default 20)
#   --dry-run       print the commands and run nothing
# such as
#     launch/tpu_pod.sh queue --name=dapo --zone=us-west4-a --accelerator=v5litepod-16 \
#         --runtime=v2-alpha-tpuv5-lite
# The flag --workdir must name a folder on a disk that all hosts have mounted.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

action="${1:-none}" dry=no name="${TPU_NAME:-}" zone="${ZONE:-}" project="${PROJECT:-}" restarts=20
accelerator="${ACCELERATOR:-}" runtime="${RUNTIME:-}" spot=() flags=()
[ "$action" != --help ] || { show_help; exit 0; }
for argument in "${@:2}"; do
    case "$argument" in
        --help) show_help; exit 0 ;;
        --dry-run) dry=yes ;;
        --name=*) name="${argument#*=}" ;;
        --zone=*) zone="${argument#*=}" ;;
        --project=*) project="${argument#*=}" ;;
        --accelerator=*) accelerator="${argument#*=}" ;;
        --runtime=*) runtime="${argument#*=}" ;;
        --restarts=*) restarts="${argument#*=}" ;;
        --spot) spot=(--spot) ;;
        --cluster=*) refuse "$argument is set by this script" ;;
        -*) flags+=("$argument") ;;
        *) refuse "'$argument' is no flag; the action comes first" ;;
    esac
done
if [ -z "$name" ] || [ -z "$zone" ]; then
    refuse "--name and --zone, or TPU_NAME and ZONE, are missing"
fi
number "$restarts" 0
where=("--zone=$zone") folder=dapo_jax
[ -z "$project" ] || where+=("--project=$project")

needs_kind() {
    if [ -z "$accelerator" ] || [ -z "$runtime" ]; then
        refuse "--accelerator and --runtime are missing"
    fi
}

everywhere() { # COMMAND: on all hosts of the slice
    perform gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command="$1"
}

train() {
    platform_flags tpu
    local command status attempt again="rm -f stopped"
    command="export LIBTPU_INIT_ARGS=$(printf %q "$LIBTPU_INIT_ARGS") &&"
    command+=" .venv/bin/python -m dapo_jax.train --cluster=auto$(printf ' %q' "${flags[@]}")"
    for ((attempt = 0; attempt <= restarts; attempt++)); do
        status=0
        everywhere "cd $folder && $again && $command" || status=$?
        case "$status" in 0 | 2 | 3) break ;; esac
        echo "ended with status $status, $((attempt + 1)) times so far" >&2
        again="{ [ ! -e stopped ] || { echo stopped by tpu_pod.sh stop >&2; exit 3; }; }"
    done
    exit "$status"
}

case "$action" in
    create)
        needs_kind
        perform gcloud compute tpus tpu-vm create "$name" "${where[@]}" \
            --accelerator-type="$accelerator" --version="$runtime" ${spot[@]+"${spot[@]}"} ;;
    queue)
        needs_kind
        perform gcloud compute tpus queued-resources create "$name" "${where[@]}" --node-id="$name" \
            --accelerator-type="$accelerator" --runtime-version="$runtime" \
            ${spot[@]+"${spot[@]}"} ;;
    status)
        perform gcloud compute tpus queued-resources describe "$name" "${where[@]}" ;;
    setup)
        perform gcloud compute tpus tpu-vm scp --recurse --worker=all "${where[@]}" \
            "$root/dapo_jax" "$root/configs" "$root/launch" "$root/requirements.txt" \
            "$name:$folder/"
        everywhere "cd $folder && bash -c '. launch/environment.sh && prepare_to_run' &&\
 .venv/bin/python -m pip install --quiet 'jax[tpu]'" ;;
    train)
        [[ " ${flags[*]-} " == *" --workdir="* ]] || refuse "--workdir=DIR is missing"
        train ;;
    stop) everywhere "touch $folder/stopped; pkill -TERM -f '[d]apo_jax.train' || true" ;;
    delete) perform gcloud compute tpus tpu-vm delete "$name" "${where[@]}" --quiet ;;
    *) refuse "'$action' is none of create, queue, status, setup, train, stop, delete" ;;
esac
