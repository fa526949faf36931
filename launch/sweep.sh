#!/usr/bin/env bash
# Submits a sweep, a job for each setting: launch/sweep.sh [options] [flags of dapo_jax.sweep], to
# SLURM as an array, or with --jobset to GKE as JobSets, such as
#     launch/sweep.sh --parallel=4 --gpus --config=FILE --out=/shared/DIR
#     launch/sweep.sh --jobset --image=I --accelerator=A --topology=4x4 --claim=C --config=FILE
#         --out=/runs/DIR
# Settings are checked and counted here first. Submitted again with the same DIR, finished ones end
# at once and the others go on. When all are over, `python -m dapo_jax.sweep` with the same flags and
# --table, where DIR is in sight, writes the table. No JobSet was applied here: the manifests are
# checked against JobSet's schema.
#   --parallel=K     SLURM: tasks of the array that run at the same time (default 8)
#   --jobset         print a manifest for each setting, named NAME-0, NAME-1, ... (--name, default
#                    dapo-jax); --apply gives them to kubectl, and the cluster's queue decides how
#                    many run
#   --dry-run        print the command (with --jobset: and the manifests) and submit nothing
# All other options of launch/slurm.sh (--time, --gpus, --sbatch=OPTION, ...), or of
# launch/gke_jobset.sh (--image, --slices, ...), hold for each job.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

jobset=no
for argument in "$@"; do
    [ "$argument" != --jobset ] || jobset=yes
done

# own ARGUMENT: whether it is an option of the script that makes each job.
own() {
    case "$jobset,$1" in
        *,--gpus) ;;
        no,--nodes=* | no,--tasks-per-node=* | no,--platform=* | no,--time=* | no,--leave=* | \
            no,--requeues=* | no,--sbatch=*) ;;
        yes,--image=* | yes,--slices=* | yes,--hosts=* | yes,--chips=* | yes,--accelerator=* | \
            yes,--topology=* | yes,--claim=* | yes,--restarts=* | yes,--grace=*) ;;
        *) return 1 ;;
    esac
}

parallel="" name=dapo-jax dry=no apply=no out="" options=() flags=()
for argument in "$@"; do
    case "$argument" in
        --help) show_help; exit 0 ;;
        --jobset) ;;
        --dry-run) dry=yes ;;
        --parallel=*) parallel="${argument#*=}" ;;
        --apply) apply=yes ;;
        --name=*) name="${argument#*=}" ;;
        --index=* | --table) refuse "$argument is not for a job; call dapo_jax.sweep" ;;
        --xpk) refuse "--xpk makes one job; call launch/gke_jobset.sh" ;;
        --out=*) out="${argument#*=}"; flags+=("$argument") ;;
        -*) if own "$argument"; then options+=("$argument"); else flags+=("$argument"); fi ;;
        *) refuse "'$argument' is no flag" ;;
    esac
done
[ -n "$out" ] || refuse "--out=DIR is missing, on a shared disk"
[ "$jobset" = no ] || [ -z "$parallel" ] || refuse "--parallel is for SLURM; a cluster has its queue"
[ "$jobset" = yes ] || [ "$apply" = no ] || refuse "--apply is for --jobset"
parallel="${parallel:-8}"
[[ "$parallel" =~ ^[1-9][0-9]*$ ]] || refuse "--parallel=$parallel is no number above 0"
python="${PYTHON_OF_RUN:-$python}"
command -v "$python" >/dev/null || refuse "there is no $python: launch/local.sh makes it, or \
PYTHON_OF_RUN names an interpreter that has the requirements"
listed="$("$python" -m dapo_jax.sweep "${flags[@]}" --dry-run)"
export DAPO_JAX_MODULE=dapo_jax.sweep

manifests() { # a setting is told by its name: the file may change while jobs wait
    local place setting
    while read -r place setting _; do
        echo ---
        "$root/launch/gke_jobset.sh" ${options[@]+"${options[@]}"} "--name=$name-$place" \
            "${flags[@]}" "--index=$setting"
    done <<<"$listed"
}

if [ "$jobset" = yes ]; then
    made="$(manifests)"
    if [ "$apply" = no ]; then
        echo "$made"
    elif [ "$dry" = yes ]; then
        printf '%s\n' "kubectl apply -f - <<the manifests below" "$made"
    else
        kubectl apply -f - <<<"$made"
    fi
    exit 0
fi
# Named by its content: jobs of an earlier submission go on reading theirs.
names="$(cut -d' ' -f2 <<<"$listed")"
[[ "$out" = /* ]] || out="$root/$out"
DAPO_JAX_SETTINGS="$out/settings-$(cksum <<<"$names" | cut -d' ' -f1).txt"
export DAPO_JAX_SETTINGS
if [ "$dry" = yes ]; then
    options+=(--dry-run)
else
    mkdir -p "$out"
    printf '%s\n' "$names" >"$DAPO_JAX_SETTINGS"
fi
last=$(($(wc -l <<<"$names") - 1))
exec "$root/launch/slurm.sh" ${options[@]+"${options[@]}"} "--sbatch=--array=0-$last%$parallel" \
    "${flags[@]}"
