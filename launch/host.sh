#!/usr/bin/env bash
# This host's part of a target that several hosts run: the leader's command on host 0, else a follower.
# All other scripts here end in this one, and in `ssd-jax draft-worker`.
set -euo pipefail
script=launch/host.sh
# shellcheck source=launch/checks.bash
source "$(dirname "${BASH_SOURCE[0]}")/checks.bash"

usage() {
  cat <<'EOF'
usage: launch/host.sh [--dry_run] [--compile_cache=DIR [--compile_cache_secret=FILE]]
                      INDEX HOSTS COMMAND [--flag=value ...]

  INDEX     number of this host, from 0, which leads
  HOSTS     see `ssd-jax generate --help`: ADDRESS:PORT,count=N of the leader, or auto, as JAX finds out
            from SLURM, a Kubernetes Indexed Job or the metadata of TPUs
  COMMAND   of ssd-jax, with its flags: what the leader runs
  --compile_cache, --compile_cache_secret  of every host, also of followers, which do not get COMMAND's
  --dry_run prints the command in place of running it
EOF
}

dry_run=false compile_cache='' compile_cache_secret=''
flags 'compile_cache compile_cache_secret' "$@"
shift "$taken"
if (($# < 3)); then
  refuse 'INDEX, HOSTS and COMMAND are needed'
elif [[ ! $1 =~ ^(0|[1-9][0-9]*)$ ]]; then
  refuse "INDEX = $1 is no number"
fi
index=$1 hosts=$2
shift 2

store=(${compile_cache:+"--compile_cache=$compile_cache"})
store+=(${compile_cache_secret:+"--compile_cache_secret=$compile_cache_secret"})
command=(ssd-jax follower ${store[@]+"${store[@]}"} "--hosts=$hosts,index=$index")
if ((index == 0)); then
  command=(ssd-jax "$1" ${store[@]+"${store[@]}"} "${@:2}" "--hosts=$hosts")
elif [[ $hosts == auto* ]]; then
  command=(ssd-jax follower ${store[@]+"${store[@]}"} "--hosts=$hosts")
fi
if $dry_run; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
