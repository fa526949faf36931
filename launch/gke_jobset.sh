#!/usr/bin/env bash
# A run on GKE as a JobSet, one pod a host: launch/gke_jobset.sh [options] [flags of dapo_jax.train]
# prints the manifest; --apply gives it to kubectl; --xpk prints the command of xpk instead, which
# makes a like manifest itself. Not applied here: the manifest is checked against JobSet's schema.
#   --name=N          of the JobSet (default dapo-jax)    --image=I       container image with the
#   --slices=S        (default 1)                                         code in its working folder
#   --hosts=H         of a slice (default 4)              --chips=C       of a host (default 4)
#   --accelerator=A   cloud.google.com/gke-tpu-accelerator, such as tpu-v5-lite-podslice
#   --topology=T      of a slice, such as 4x4; empty with --gpus
#   --gpus            the chips are GPUs: nvidia.com/gpu; one process a host
#   --claim=C         PersistentVolumeClaim that holds the work directory, mounted at /runs
#   --restarts=K      of the whole JobSet after a failure or preemption (default 20)
#   --grace=S         seconds after SIGTERM in which the run saves (default 300)
#   --cluster-name=G  --tpu-type=V   for xpk, such as v5litepod-16
#   --apply, --xpk    see above; --dry-run prints the command and the manifest, and applies nothing
# Several slices are the data axis: give --config.mesh.data. launch/sweep.sh --jobset prints one such
# manifest for each setting of a sweep. Such as
#     launch/gke_jobset.sh --image=IMAGE --accelerator=tpu-v5-lite-podslice --topology=4x4 \
#         --claim=runs --config=configs/quickstart.py --workdir=/runs/one --config.mesh.data=16
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

dry=no apply=no xpk=no name=dapo-jax image="" slices=1 hosts=4 chips=4 accelerator="" topology=""
gpus=no claim="" restarts=20 grace=300 cluster="" tpu_type="" flags=()
for argument in "$@"; do
    case "$argument" in
        --help) show_help; exit 0 ;;
        --dry-run) dry=yes ;;
        --apply) apply=yes ;;
        --xpk) xpk=yes ;;
        --gpus) gpus=yes ;;
        --name=*) name="${argument#*=}" ;;
        --image=*) image="${argument#*=}" ;;
        --slices=*) slices="${argument#*=}" ;;
        --hosts=*) hosts="${argument#*=}" ;;
        --chips=*) chips="${argument#*=}" ;;
        --accelerator=*) accelerator="${argument#*=}" ;;
        --topology=*) topology="${argument#*=}" ;;
        --claim=*) claim="${argument#*=}" ;;
        --restarts=*) restarts="${argument#*=}" ;;
        --grace=*) grace="${argument#*=}" ;;
        --cluster-name=*) cluster="${argument#*=}" ;;
        --tpu-type=*) tpu_type="${argument#*=}" ;;
        --cluster=*) refuse "$argument is set by this script; xpk's is --cluster-name" ;;
        -*) flags+=("$argument") ;;
        *) refuse "'$argument' is no flag" ;;
    esac
done
[ -n "$image" ] || refuse "--image is missing"
[[ "$name" =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || refuse "--name=$name: a to z, 0 to 9 and '-'"
for each in "$slices" "$hosts" "$chips"; do number "$each" 1; done
for each in "$restarts" "$grace"; do number "$each" 0; done
run="python -m ${DAPO_JAX_MODULE:-dapo_jax.train}"
[ "${#flags[@]}" -eq 0 ] || run+="$(printf ' %q' "${flags[@]}")"

if [ "$xpk" = yes ]; then
    if [ -z "$cluster" ] || [ -z "$tpu_type" ]; then
        refuse "--cluster-name and --tpu-type are missing"
    fi
    printf '%q ' xpk workload create "--cluster=$cluster" "--workload=$name" \
        "--tpu-type=$tpu_type" "--num-slices=$slices" "--docker-image=$image" \
        "--max-restarts=$restarts" "--termination-grace-period-seconds=$grace" \
        "--command=$run --cluster=auto"
    echo
    exit 0
fi

if [ "$gpus" = yes ]; then
    resource=nvidia.com/gpu selector=cloud.google.com/gke-accelerator
    platform_flags gpu
    flag_name=XLA_FLAGS flag_value="$XLA_FLAGS"
    # The place of a pod: its slice's number and its own; both are set by Kubernetes.
    run+=" --cluster=manual --coordinator=$name-slice-0-0.$name:8476 --processes=$((slices * hosts))"
    run+=" --process=\$((JOB_INDEX * $hosts + JOB_COMPLETION_INDEX))"
else
    [ -n "$topology" ] || refuse "--topology is missing"
    resource=google.com/tpu selector=cloud.google.com/gke-tpu-accelerator
    platform_flags tpu
    flag_name=LIBTPU_INIT_ARGS flag_value="$LIBTPU_INIT_ARGS"
    run+=" --cluster=auto"
fi
[ -n "$accelerator" ] || refuse "--accelerator is missing"

quoted() { # TEXT: as a string of YAML in single quotes
    printf "'%s'" "${1//\'/\'\'}"
}

manifest() {
    cat <<MANIFEST
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $restarts
    rules: # bad input and limits: the same would come of another start
      - name: not-again
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  network:
    enableDNSHostnames: true
  replicatedJobs:
    - name: slice
      replicas: $slices
      template:
        spec:
          parallelism: $hosts
          completions: $hosts
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [2, 3]
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: $grace
              nodeSelector:
                $selector: $(quoted "$accelerator")
MANIFEST
    [ "$gpus" = yes ] || echo "                cloud.google.com/gke-tpu-topology: $(quoted "$topology")"
    cat <<MANIFEST
              containers:
                - name: train
                  image: $(quoted "$image")
                  command: [bash, -c]
                  args:
                    - $(quoted "exec $run")
                  env:
                    - name: $flag_name
                      value: $(quoted "$flag_value")
                    - name: JOB_INDEX
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.labels['jobset.sigs.k8s.io/job-index']
                  ports:
                    - containerPort: 8476
                  resources:
                    limits:
                      $resource: $chips
MANIFEST
    [ -n "$claim" ] || return 0
    cat <<MANIFEST
                  volumeMounts:
                    - name: runs
                      mountPath: /runs
              volumes:
                - name: runs
                  persistentVolumeClaim:
                    claimName: $(quoted "$claim")
MANIFEST
}

if [ "$apply" = yes ]; then
    [ "$dry" = no ] || { echo "kubectl apply -f - <<the manifest below"; manifest; exit 0; }
    manifest | kubectl apply -f -
else
    manifest
fi
