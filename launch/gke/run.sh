#!/usr/bin/env bash
# A JobSet of Kubernetes with two replicated jobs, "target" and "draft", each a JAX cluster of its own; for `serve`
# also a Service.
set -euo pipefail
script=launch/gke/run.sh
# shellcheck source=launch/checks.bash
source "$(dirname "${BASH_SOURCE[0]}")/../checks.bash"

usage() {
  cat <<'EOF'
usage: launch/gke/run.sh [--dry_run] --image=IMAGE --hosts=N --accelerator=NAME --chips=N [--topology=AxB]
                         [--name=ssd] [--draft=SOURCE --draft_accelerator=NAME --draft_chips=N
                         --draft_topology=AxB --draft_devices=LIST] [--port=4711] [--hf_token=SECRET]
                         [--volume=CLAIM | --bucket=BUCKET [--service_account=NAME]] [--answers=FILE]
                         [--compile_cache_secret=SECRET] [--api_keys=SECRET]
                         COMMAND [--flag=value ...]

  --image        with ssd_jax and launch/ in /ssd: see launch/gke/Dockerfile
  --hosts        of the target
  --accelerator  of its nodes: a TPU such as tpu-v6e-slice, with --topology, or a GPU such as
                 nvidia-h100-80gb, without
  --chips        TPU chips or GPUs of a node
  --draft        source of a draft, which a worker on one node serves; default accelerator: none, its processor
  --draft_devices  of that node that share the draft, such as 0-3; default: one
  --port         of that worker
  --hf_token     a secret whose key `token` is a token of Hugging Face, for weights of hf: sources:
                 kubectl create secret generic hf --from-literal=token=hf_...
  --volume       a claim of a volume that all pods can mount, as /data: weights of hf: sources are kept in
                 /data/huggingface, and COMMAND can read --target=/data/model or --prompt_file=/data/prompts.jsonl
  --bucket       a bucket of Cloud Storage as /data in place of a volume, for what is there already; the cluster needs
                 GcsFuseCsiDriver, and
  --service_account  of Kubernetes may read and write it; default: the default one
  --answers      file under /data for the leader's standard output; default: the log of its pod
  --compile_cache_secret  a secret whose key `secret` is one that all pods which share compiled programs in
                 /data/programs have; without it each pod compiles its own:
                 kubectl create secret generic programs --from-literal=secret="$(openssl rand -hex 32)"
  --api_keys     of the command serve, a secret whose key `keys` has the keys that clients may send, one a line:
                 kubectl create secret generic keys --from-literal=keys="$(openssl rand -hex 32)"
  --dry_run      prints the manifest in place of applying it

The draft's pod is started again whenever it fails, and the target decodes without it meanwhile; a pod of
the target that fails ends the set. With the command serve the leader has probes, and the Service NAME-server leads to
its port; the set is started again when a pod of the target fails, and a pod that is to end has its --drain_seconds for
the texts that run. The worker's token and certificate are in a secret, NAME-draft:
  launch/secrets.sh secrets ssd-draft-0-0.ssd
  kubectl create secret generic ssd-draft --from-file=secrets
EOF
}

image='' hosts='' accelerator='' chips='' topology='' name=ssd port=4711 dry_run=false
draft='' draft_devices='' draft_accelerator='' draft_chips='' draft_topology=''
hf_token='' volume='' bucket='' service_account='' answers='' compile_cache_secret='' api_keys=''
names='image hosts accelerator chips topology name port hf_token volume bucket service_account answers compile_cache_secret api_keys'
flags "$names draft draft_devices draft_accelerator draft_chips draft_topology" "$@"
shift "$taken"
given COMMAND "${1:-}"
given --image "$image"
if [[ ! $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]]; then
  refuse "--name=$name is no name of Kubernetes: small letters, digits and -, such as ssd"
fi
number --hosts "$hosts"
given --accelerator "$accelerator"
number --chips "$chips"
port "$port" 65535
of_draft draft_devices draft_accelerator draft_chips draft_topology
target_of "$@"
http_port=8000 drain_seconds=30 scheme=HTTP no_host=yes
if [[ $1 == serve ]]; then
  for word in "$@"; do
    case $word in
      --port=*) http_port=${word#*=} ;;
      --drain_seconds=*) drain_seconds=${word#*=} ;;
      --ssl_certfile=*) scheme=HTTPS ;;
      --host=*) no_host='' ;;
    esac
  done
  number 'serve --port' "$http_port"
  [[ $drain_seconds =~ ^(0|[1-9][0-9]*)$ ]] || refuse "serve --drain_seconds=$drain_seconds is no number from 0 on"
elif [[ -n $api_keys ]]; then
  refuse '--api_keys is of the command serve'
fi
if [[ -n $draft_accelerator ]]; then
  number --draft_chips "$draft_chips"
elif [[ -n $draft_chips$draft_topology ]]; then
  refuse '--draft_chips and --draft_topology are of an accelerator; give --draft_accelerator'
fi
if [[ -n $volume && -n $bucket ]]; then
  refuse '--volume and --bucket would both be /data; give one of them'
elif [[ -n $service_account && -z $bucket ]]; then
  refuse '--service_account is who uses a bucket; give --bucket'
elif [[ -n $answers && -z $volume$bucket ]]; then
  refuse "--answers=$answers would end with its pod; give --volume or --bucket, or read the pod's log"
elif [[ -n $compile_cache_secret && -z $volume$bucket ]]; then
  refuse '--compile_cache_secret is of programs that pods share; give --volume or --bucket'
elif [[ -n $answers && $answers != /data/?* ]]; then
  refuse "--answers=$answers is no file under /data"
fi
$dry_run || needs kubectl 'install it and choose a cluster'

text() { # a string of JSON, which is one of YAML
  local value=${1//\\/\\\\}
  value=${value//\"/\\\"}
  value=${value//$'\n'/\\n}
  value=${value//$'\r'/\\r}
  printf '"%s"' "$value"
}

words() { # the same, of a command, one a line; Kubernetes reads $$ as $, and $(NAME) as a variable
  local each
  for each in "$@"; do
    printf '%16s- %s\n' '' "$(text "${each//\$/\$\$}")"
  done
}

place() { # ACCELERATOR CHIPS TOPOLOGY: where pods run, and what they need there
  local resource=nvidia.com/gpu
  [[ -z $1 ]] && return
  echo '              nodeSelector:'
  if [[ -n $3 ]]; then
    resource=google.com/tpu
    echo "                cloud.google.com/gke-tpu-accelerator: $(text "$1")"
    echo "                cloud.google.com/gke-tpu-topology: $(text "$3")"
  else
    echo "                cloud.google.com/gke-accelerator: $(text "$1")"
  fi
  resources="                resources: {limits: {$resource: $2}}"
}

data() { # adds to `mounts`, `volumes` and `variables` of a pod
  if [[ -n $draft ]]; then
    mounts+=('{name: secrets, mountPath: /secrets, readOnly: true}')
    volumes+=("{name: secrets, secret: {secretName: $name-draft, defaultMode: 256}}")
  fi
  if [[ -n $volume ]]; then
    volumes+=("{name: data, persistentVolumeClaim: {claimName: $(text "$volume")}}")
  elif [[ -n $bucket ]]; then
    local attributes
    attributes="{bucketName: $(text "$bucket"), mountOptions: implicit-dirs}"
    volumes+=("{name: data, csi: {driver: gcsfuse.csi.storage.gke.io, volumeAttributes: $attributes}}")
  fi
  if [[ -n $volume$bucket ]]; then
    mounts+=('{name: data, mountPath: /data}')
  fi
  if [[ -n $compile_cache_secret ]]; then
    mounts+=('{name: programs, mountPath: /programs, readOnly: true}')
    volumes+=("{name: programs, secret: {secretName: $(text "$compile_cache_secret"), defaultMode: 256}}")
  fi
  if [[ -n $volume ]]; then # a bucket has no locks, which hosts that download the same need
    variables+=('{name: HF_HOME, value: /data/huggingface}')
  fi
  if [[ -n $hf_token ]]; then
    variables+=("{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: $(text "$hf_token"), key: token}}}")
  fi
}

probe() { # NAME PATH SECONDS FAILURES: of the leader; the other hosts have no server, and always pass
  echo "                $1:"
  if ((hosts == 1)); then
    echo "                  httpGet: {path: $2, port: $http_port, scheme: $scheme}"
  else
    local ask="import ssl, urllib.request as r; r.urlopen('${scheme,,}://127.0.0.1:$http_port$2', timeout=5, "
    ask+='context=ssl._create_unverified_context())'
    # shellcheck disable=SC2016
    printf '                  exec: {command: [bash, -c, %s]}\n' \
      "$(text '[[ $JOB_COMPLETION_INDEX != 0 ]] || exec python3 -c '"\"$ask\"")"
  fi
  echo "                  periodSeconds: $3"
  echo "                  timeoutSeconds: 10"
  echo "                  failureThreshold: $4"
}

list() { # INDENT KEY ITEM...: a list of YAML, or nothing where it is empty
  local indent=$1 key=$2 item
  shift 2
  (($#)) || return 0
  printf '%*s%s:\n' "$indent" '' "$key"
  for item in "$@"; do
    printf '%*s- %s\n' "$indent" '' "$item"
  done
}

job() { # NAME PODS RETRIES RESTART ARGUMENTS...: a replicated job
  local job=$1 pods=$2 retries=$3 restart=$4 where=("$5" "$6" "$7") resources='' mounts=() volumes=() variables=()
  shift 7
  data
  if [[ $job == target && -n $api_keys ]]; then
    mounts+=('{name: keys, mountPath: /keys, readOnly: true}')
    volumes+=("{name: keys, secret: {secretName: $(text "$api_keys"), defaultMode: 256}}")
  fi
  cat <<EOF
  - name: $job
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: $pods
        parallelism: $pods
        backoffLimit: $retries
        template:
EOF
  if [[ -n $bucket ]]; then
    echo '          metadata: {annotations: {gke-gcsfuse/volumes: "true"}}'
  fi
  cat <<EOF
          spec:
              restartPolicy: $restart
EOF
  if [[ -n $service_account ]]; then
    echo "              serviceAccountName: $(text "$service_account")"
  fi
  if [[ $job == target && $command_name == serve ]]; then
    echo "              terminationGracePeriodSeconds: $((drain_seconds + 15))"
  fi
  place "${where[@]}"
  cat <<EOF
              containers:
              - name: $job
                image: $(text "$image")
                workingDir: /ssd
                command:
$(words "$@")
EOF
  if [[ -n $resources ]]; then
    echo "$resources"
  fi
  if [[ $job == target && $command_name == serve ]]; then
    echo "                ports: [{name: http, containerPort: $http_port}]"
    probe startupProbe /health/live 10 360
    probe readinessProbe /health/ready 5 2
    probe livenessProbe /health/live 10 6
  fi
  list 16 env ${variables[@]+"${variables[@]}"}
  list 16 volumeMounts ${mounts[@]+"${mounts[@]}"}
  list 14 volumes ${volumes[@]+"${volumes[@]}"}
}

service() { # to the leader
  cat <<EOF
---
apiVersion: v1
kind: Service
metadata:
  name: $name-server
spec:
  selector:
    jobset.sigs.k8s.io/jobset-name: $name
    jobset.sigs.k8s.io/replicatedjob-name: target
    batch.kubernetes.io/job-completion-index: "0"
  ports: [{name: http, port: $http_port, targetPort: $http_port}]
EOF
}

manifest() {
  local command=("$@") command_name=$1 worker_host="$name-draft-0-0.$name" worker store=() restarts=0
  if [[ $command_name == serve ]]; then
    restarts=1000000
    command+=(${no_host:+--host=0.0.0.0} ${api_keys:+--api_key_file=/keys/keys})
  fi
  if [[ -n $compile_cache_secret ]]; then
    store=(--compile_cache=/data/programs --compile_cache_secret=/programs/secret)
  fi
  cat <<EOF
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
spec:
  network: {enableDNSHostnames: true, subdomain: $name}
  failurePolicy: {maxRestarts: $restarts}
  successPolicy: {operator: All, targetReplicatedJobs: [target]}
  replicatedJobs:
EOF
  if [[ -n $draft ]]; then
    command+=("--draft=$draft" "--draft_placement=remote:$worker_host:$port" --draft_tls_ca=/secrets/worker.pem)
    command+=(--draft_token_file=/secrets/token)
  fi
  # JAX knows the hosts of a TPU slice; those of GPUs it is told.
  local group=auto
  if [[ -z $topology ]]; then
    group="$name-target-0-0.$name:4000,count=$hosts"
  fi
  # Each pod knows its number; that of the leader is 0.
  # shellcheck disable=SC2016
  local start="exec launch/host.sh ${store[*]:+${store[*]} }"'"$JOB_COMPLETION_INDEX" "$@"'
  if [[ -n $answers ]]; then
    # shellcheck disable=SC2016
    start='[[ $JOB_COMPLETION_INDEX != 0 ]] || exec >'"$(printf %q "$answers"); $start"
  fi
  job target "$hosts" 0 Never "$accelerator" "$chips" "$topology" \
    bash -c "$start" host "$group" "${command[@]}"
  if [[ -n $draft ]]; then
    worker=(ssd-jax draft-worker "--listen=0.0.0.0:$port" "--draft=$draft" --token_file=/secrets/token)
    worker+=(--tls_cert=/secrets/worker.pem --tls_key=/secrets/worker.key)
    worker+=(${target:+"--target=$target"} ${draft_devices:+"--draft_devices=$draft_devices"})
    worker+=(${store[@]+"${store[@]}"})
    job draft 1 1000000 OnFailure "$draft_accelerator" "$draft_chips" "$draft_topology" "${worker[@]}"
  fi
  if [[ $command_name == serve ]]; then
    service
  fi
}

if $dry_run; then
  manifest "$@"
else
  manifest "$@" | kubectl apply -f -
fi
