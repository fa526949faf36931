#!/usr/bin/env bash
# Trains in several processes of this machine: launch/processes.sh N [options] [flags of
# dapo_jax.train], such as
#     launch/processes.sh 2 --devices=2 --config=configs/quickstart.py --workdir=runs/two \
#         --config.mesh.data=4
# What process 1 prints stands behind [1]; DIR/logs has each one's messages too. If one process
# fails, the others are ended, a message names it, and its exit status is that of this script.
# SIGTERM and Ctrl-C reach all processes: the run saves and leaves.
#   --devices=D    devices of each process on the CPU (default 1)
#   --gpus=K       each process sees K GPUs of its own, by CUDA_VISIBLE_DEVICES (not run here)
#   --platform=P   flags for XLA: cpu, gpu, gpu-deterministic or tpu (default: gpu with --gpus)
#   --restarts=K   after a failure, start again from the newest checkpoint up to K times (default
#                  0); bad input, a limit or a signal to this script are no failures
#   --grace=S      seconds for the others to end by themselves after a failure (default 10)
#   --dry-run      print the commands and run nothing
set -euo pipefail
set -m # each process has a group of its own: Ctrl-C comes to this script alone, which passes it on
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

count="" dry=no devices=1 gpus=0 platform="" restarts=0 grace=10 flags=()
for argument in "$@"; do
    case "$argument" in
        --help) show_help; exit 0 ;;
        --dry-run) dry=yes ;;
        --devices=*) devices="${argument#*=}" ;;
        --gpus=*) gpus="${argument#*=}" ;;
        --platform=*) platform="${argument#*=}" ;;
        --restarts=*) restarts="${argument#*=}" ;;
        --grace=*) grace="${argument#*=}" ;;
        --cluster=* | --coordinator=* | --process=* | --processes=*)
            refuse "$argument is set by this script" ;;
        -*) flags+=("$argument") ;;
        *)
            [ -z "$count" ] || refuse "'$argument' is no flag, and N is $count already"
            count="$argument" ;;
    esac
done
[ -n "$count" ] || refuse "N, the number of processes, is missing"
for each in "$count" "$devices"; do number "$each" 1; done
for each in "$gpus" "$restarts" "$grace"; do number "$each" 0; done
if [ -z "$platform" ]; then platform=$([ "$gpus" -gt 0 ] && echo gpu || echo cpu); fi
platform_flags "$platform"
[ "$devices" = 1 ] ||
    export XLA_FLAGS="--xla_force_host_platform_device_count=$devices ${XLA_FLAGS:-}"
python="${PYTHON_OF_RUN:-$python}" # an interpreter that has the requirements already
[ "$dry" = yes ] || [ -n "${PYTHON_OF_RUN:-}" ] || prepare_to_run
cd "$root"

free_port() {
    "$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

pids=() told=no
start_one() { # INDEX PORT
    local environment=(env) command
    if [ "$gpus" -gt 0 ]; then
        environment+=("CUDA_VISIBLE_DEVICES=$(seq -s, $(($1 * gpus)) $((($1 + 1) * gpus - 1)))")
    fi
    [ -z "${XLA_FLAGS:-}" ] || environment+=("XLA_FLAGS=$XLA_FLAGS")
    command=("${environment[@]}" "$python" -m dapo_jax.train --cluster=manual
        "--coordinator=127.0.0.1:$2" "--processes=$count" "--process=$1" "${flags[@]}")
    if [ "$dry" = yes ]; then
        perform "${command[@]}"
    else
        "${command[@]}" > >(exec sed -u "s/^/[$1] /") 2>&1 &
        pids+=($!)
    fi
}

tell() { # SIGNAL: to every process that still runs
    local pid
    for pid in "${pids[@]}"; do kill "-$1" "$pid" 2>/dev/null || true; done
}

trap 'told=yes; tell TERM' TERM INT

# Waits for all; sets `failed` to the status of the first that failed, else 0. Polling, since a bash
# of before 5.1 cannot say which process it waited for.
wait_for_all() {
    local left=("${!pids[@]}") still index status seconds=0
    failed=0
    while [ "${#left[@]}" -gt 0 ]; do
        still=()
        for index in "${left[@]}"; do
            if kill -0 "${pids[index]}" 2>/dev/null; then
                still+=("$index")
                continue
            fi
            status=0
            wait "${pids[index]}" || status=$?
            if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
                failed=$status
                echo "process $index of $count ended with status $status; the others have" \
                    "$grace s to end" >&2
            fi
        done
        left=(${still[@]+"${still[@]}"})
        [ "${#left[@]}" -eq 0 ] || sleep 1 || true
        if [ "$failed" != 0 ] && [ "$told" = no ]; then
            seconds=$((seconds + 1))
            [ "$seconds" -le "$grace" ] || tell KILL
        fi
    done
}

for ((attempt = 0; attempt <= restarts; attempt++)); do
    pids=()
    port=PORT
    [ "$dry" = yes ] || port=$(free_port)
    for ((index = 0; index < count; index++)); do start_one "$index" "$port"; done
    [ "$dry" = no ] || exit 0
    [ "$told" = no ] || tell TERM # before they were there
    wait_for_all
    case "$failed" in 0 | 2 | 3) break ;; esac
    if [ "$told" = yes ] || [ "$attempt" -ge "$restarts" ]; then break; fi
    echo "starting again, $((attempt + 1)) of $restarts times" >&2
done
exit "$failed"
