#!/usr/bin/env bash
# A target over the hosts of a TPU slice, and its draft on another slice or a virtual machine with one host.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=launch/tpu_vm/run.sh
# shellcheck source=launch/checks.bash
source "$here/checks.bash"

usage() {
  cat <<'EOF'
usage: launch/tpu_vm/run.sh [--dry_run] --tpu=NAME --hosts=N --zone=ZONE [--draft=SOURCE --draft_tpu=NAME
                            --draft_address=ADDRESS] [--draft_devices=LIST] [--port=4711] [--setup=COMMAND]
                            COMMAND [--flag=value ...]

  --tpu, --hosts   the target's slice, and how many hosts it has
  --draft          source of a draft, which a worker on
  --draft_tpu      a slice of one host serves, that the target's hosts reach at
  --draft_address  its internal address, and
  --port
  --draft_devices  of that host that share the draft, such as 0-3; default: one
  --setup          what each host runs first, such as --setup='source ssd/.venv/bin/activate && cd ssd';
                   it must leave `ssd-jax` on the path and launch/ in the directory
  --dry_run        prints the commands in place of running them

launch/tpu_vm/run.sh --tpu=target --hosts=4 --zone=us-east5-a --draft=hf:org/draft --draft_tpu=draft \
  --draft_address=10.0.0.7 generate --target=hf:org/model --mesh=tensor=16 --mode=ssd --prompt='...'
EOF
}

tpu='' hosts='' zone='' draft='' draft_devices='' draft_tpu='' draft_address='' port=4711 setup=true dry_run=false
flags 'tpu hosts zone draft draft_devices draft_tpu draft_address port setup' "$@"
shift "$taken"
given COMMAND "${1:-}"
given --tpu "$tpu"
number --hosts "$hosts"
given --zone "$zone"
port "$port" 65535
of_draft draft_devices draft_tpu draft_address
target_of "$@"
setup=${setup:-true}
host=${draft_address#[} # an IPv6 address is in brackets where a port follows
host=${host%]} at=$draft_address
[[ $host != *:* ]] || at="[$host]"
if [[ -n $draft ]]; then
  given --draft_tpu "$draft_tpu"
  given --draft_address "$draft_address"
fi

$dry_run || needs gcloud 'install the Google Cloud CLI'

there=/tmp/ssd-jax-secrets
gcloud=(gcloud compute tpus tpu-vm)
on() { # NAME WORKER COMMAND...: runs a command on a host of a slice, with the options in `ssh`
  local name=$1 worker=$2
  shift 2
  run "${gcloud[@]}" ssh "$name" "--zone=$zone" "--worker=$worker" "--command=$setup && $(printf '%q ' "$@")" \
    ${ssh[@]+"${ssh[@]}"}
}

command=("$@")
ssh=() secrets=''
set -m
end() {
  if [[ -n $secrets ]] && ! $dry_run; then
    rm -rf "$secrets"
  fi
  end_jobs
}
trap end EXIT
if [[ -n $draft ]]; then
  secrets=SECRETS
  if ! $dry_run; then
    secrets=$(mktemp -d)
  fi
  if ! $dry_run; then
    "$here/secrets.sh" "$secrets" "$host"
  fi
  for each in "$tpu:all" "$draft_tpu:0"; do # nobody else may read the token
    on "${each%:*}" "${each##*:}" mkdir -p -m 700 "$there"
    run "${gcloud[@]}" scp "$secrets/token" "$secrets/worker.pem" "${each%:*}:$there/" "--zone=$zone" \
      "--worker=${each##*:}"
    on "${each%:*}" "${each##*:}" chmod 600 "$there/token"
  done
  run "${gcloud[@]}" scp "$secrets/worker.key" "$draft_tpu:$there/" "--zone=$zone" --worker=0
  worker=(ssd-jax draft-worker "--listen=$at:$port" "--draft=$draft" "--token_file=$there/token")
  worker+=("--tls_cert=$there/worker.pem" "--tls_key=$there/worker.key")
  worker+=(${target:+"--target=$target"} ${draft_devices:+"--draft_devices=$draft_devices"})
  ssh=(-- -tt) # with a terminal, which ends the worker when it is closed
  on "$draft_tpu" 0 "${worker[@]}" </dev/null &
  ssh=()
  if $dry_run; then wait; fi
  command+=("--draft=$draft" "--draft_placement=remote:$at:$port")
  command+=("--draft_tls_ca=$there/worker.pem" "--draft_token_file=$there/token")
fi
for ((index = 1; index < hosts; index++)); do
  on "$tpu" "$index" launch/host.sh "$index" auto "${command[@]}" </dev/null &
  if $dry_run; then wait; fi
done
on "$tpu" 0 launch/host.sh 0 auto "${command[@]}"
