#!/usr/bin/env bash
# What a draft worker and its engines need to know each other: a token, and a certificate of the worker's.
set -euo pipefail
script=launch/secrets.sh
# shellcheck source=launch/checks.bash
source "$(dirname "${BASH_SOURCE[0]}")/checks.bash"

usage() {
  cat <<'EOF'
usage: launch/secrets.sh [--dry_run] DIRECTORY HOST

Writes token, worker.key and worker.pem to DIRECTORY, for a worker that engines call HOST (a name or a
number). The certificate signs itself, so worker.pem is also what engines trust (--draft_tls_ca). It is
good for 90 days. Files that are there stay, but a certificate for another HOST, or with less than a week
left, is made anew.
EOF
}

dry_run=false
flags '' "$@"
shift "$taken"
if (($# != 2)); then
  refuse 'DIRECTORY and HOST are needed'
fi
directory=$1 host=$2
name=DNS:$host check=-checkhost
if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then
  name=IP:$host check=-checkip
fi
if [[ ! $host =~ ^[A-Za-z0-9.:_*-]+$ ]]; then
  refuse "HOST = '$host' is no name or number of a host"
fi
if $dry_run; then
  printf 'token, worker.key and worker.pem for %s in %q\n' "$name" "$directory"
  exit 0
fi

umask 077
mkdir -p "$directory"
key=$directory/worker.key certificate=$directory/worker.pem
fits() { # -checkhost and -checkip say in words alone that the name is another one
  [[ -e $key ]] && openssl x509 -in "$certificate" -noout -checkend $((7 * 86400)) &&
    openssl x509 -in "$certificate" -noout "$check" "$host" | grep -q 'does match'
}
if ! fits &>/dev/null; then
  said=$(openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 90 -subj /CN=ssd-draft \
    -addext "subjectAltName=$name" -keyout "$key" -out "$certificate" 2>&1) ||
    refuse "openssl makes no certificate for $name in $directory: ${said//$'\n'/; }"
fi
if [[ ! -e $directory/token ]]; then
  openssl rand -hex 32 >"$directory/token"
fi
