#!/usr/bin/env bash
# A target over several processes of this machine, and its draft in one more, over loopback: what the
# other scripts do with hosts, for trying it and for tests.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=launch/local.sh
# shellcheck source=launch/checks.bash
source "$here/checks.bash"

usage() {
  cat <<'EOF'
usage: launch/local.sh [--dry_run] [--processes=2] [--devices=1] [--draft=SOURCE [--draft_devices=LIST]]
                       [--port=N] COMMAND [--flag=value ...]

  --processes  of the target, each with as many virtual devices of the processor as
  --devices    says
  --draft      source of a draft, which a worker of its own serves; without it COMMAND names one, or none
  --draft_devices  that share it, such as cpu:0-1; default: one
  --port       of the leader; the draft worker has the next one; default: two that are free now
  --dry_run    prints the commands in place of running them

launch/local.sh --processes=2 --draft=default generate --mode=ssd --prompt='Why is the sky blue?'
EOF
}

processes=2 devices=1 draft='' draft_devices='' port='' dry_run=false
flags 'processes devices draft draft_devices port' "$@"
shift "$taken"
given COMMAND "${1:-}"
number --processes "$processes"
number --devices "$devices"
of_draft draft_devices
if [[ -n $port ]]; then
  port "$port" 65534
fi
target_of "$@"

free_ports() {
  python3 - <<'EOF'
import socket
for port in range(20000, 30000, 2):
    try:
        for each in (port, port + 1):
            with socket.socket() as free:
                free.bind(("127.0.0.1", each))
        break
    except OSError:
        continue
print(port)
EOF
}

port=${port:-$(free_ports)}
hosts="127.0.0.1:$port,count=$processes"
command=("$@")
worker=()
if [[ -n $draft ]]; then
  worker=(ssd-jax draft-worker "--listen=127.0.0.1:$((port + 1))" "--draft=$draft")
  worker+=(${target:+"--target=$target"} ${draft_devices:+"--draft_devices=$draft_devices"})
  command+=("--draft=$draft" "--draft_placement=remote:127.0.0.1:$((port + 1))")
fi

if $dry_run; then
  if ((${#worker[@]})); then
    printf '%q ' "${worker[@]}"
    echo
  fi
  for ((index = processes - 1; index >= 0; index--)); do
    "$here/host.sh" --dry_run "$index" "$hosts" "${command[@]}"
  done
  exit 0
fi

export JAX_PLATFORMS=cpu
children=()
# A trap calls it.
# shellcheck disable=SC2329
end() {
  trap - EXIT INT TERM
  if ((${#children[@]})); then
    kill "${children[@]}" 2>/dev/null || true
    wait "${children[@]}" 2>/dev/null || true
  fi
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if ((${#worker[@]})); then
  "${worker[@]}" &
  children+=($!)
fi
export JAX_NUM_CPU_DEVICES=$devices
for ((index = 1; index < processes; index++)); do
  "$here/host.sh" "$index" "$hosts" "${command[@]}" &
  children+=($!)
done
# A command behind `&` would read nothing.
"$here/host.sh" 0 "$hosts" "${command[@]}" <&0 &
leader=$!
children+=("$leader")
status=0
wait "$leader" || status=$?
exit "$status"
