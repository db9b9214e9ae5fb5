#!/usr/bin/env bash
# A job of SLURM with two steps: the draft on its last node, the target over the others.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ ${1:-} != --job=* ]] || here=${1#--job=} # a job runs a copy that SLURM made of this script
script=launch/slurm/run.sh
# shellcheck source=launch/checks.bash
source "$here/checks.bash"

usage() {
  cat <<'EOF'
usage: launch/slurm/run.sh [--dry_run] --nodes=N [--draft=SOURCE [--draft_devices=LIST]] [--port=4711]
                           [--directory=DIR] [--setup=COMMAND] [--sbatch=FLAG ...] COMMAND
                           [--flag=value ...]

  --nodes      of the target; with --draft the job has one more
  --draft      source of a draft, which a worker on the last node serves
  --draft_devices  of that node that share the draft, such as 0-3; default: one
  --port       of that worker
  --directory  on a file system that all nodes share, for its token and certificate, of one job at a time;
               default: ./ssd-JOB
  --setup      what each node runs first, such as --setup='module load cuda && source ssd/.venv/bin/activate'; it
               must leave `ssd-jax` on the path
  --sbatch     a flag for sbatch, such as --sbatch=--partition=gpu; any number of them
  --dry_run    prints the commands in place of submitting them

launch/slurm/run.sh --nodes=2 --draft=hf:org/draft --sbatch=--gpus-per-node=8 \
  generate --target=hf:org/model --mesh=tensor=16 --mode=ssd --prompt_file=prompts.jsonl --json
EOF
}

nodes='' draft='' draft_devices='' port=4711 directory='' setup='' dry_run=false job=''
sbatch=(sbatch "--job-name=ssd-jax" "--ntasks-per-node=1")
while [[ ${1:-} == --* ]]; do
  case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --draft=*) draft=${1#*=} ;;
    --draft_devices=*) draft_devices=${1#*=} ;;
    --port=*) port=${1#*=} ;;
    --directory=*) directory=${1#*=} ;;
    --setup=*) setup=${1#*=} ;;
    --sbatch=*) sbatch+=("${1#*=}") ;;
    --dry_run) dry_run=true ;;
    --job=*) job=yes ;; # this is the job: not for users
    --help) usage; exit 0 ;;
    *) refuse "unknown flag $1" ;;
  esac
  shift
done
given COMMAND "${1:-}"
number --nodes "$nodes"
port "$port" 65535
of_draft draft_devices
target_of "$@"
setup=${setup:-true}

if [[ -z $job ]]; then
  own=("--job=$here" "--nodes=$nodes" "--port=$port" "--directory=$directory" "--setup=$setup")
  all=$nodes
  if [[ -n $draft ]]; then
    own+=("--draft=$draft" "--draft_devices=$draft_devices")
    all=$((nodes + 1))
  fi
  command=("${sbatch[@]}" "--nodes=$all" "$here/slurm/run.sh" "${own[@]}" "$@")
  if ! $dry_run; then
    needs sbatch 'run this on a login node of the cluster'
    exec "${command[@]}"
  fi
  printf '%q ' "${command[@]}"
  printf '\n# which runs\n'
  SLURM_JOB_ID=JOB exec "$here/slurm/run.sh" --dry_run "${own[@]}" "$@"
fi

command=("$@")
if [[ -n $draft ]]; then
  directory=${directory:-$PWD/ssd-$SLURM_JOB_ID}
  host=DRAFT_HOST
  if ! $dry_run; then
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
  fi
  run "$here/secrets.sh" "$directory" "$host"
  worker=(ssd-jax draft-worker "--listen=$host:$port" "--draft=$draft" "--token_file=$directory/token")
  worker+=("--tls_cert=$directory/worker.pem" "--tls_key=$directory/worker.key")
  worker+=(${target:+"--target=$target"} ${draft_devices:+"--draft_devices=$draft_devices"})
  set -m
  trap end_jobs EXIT
  # The job goes on without the draft, and SLURM does not start it again.
  run srun --nodes=1 --ntasks=1 "--relative=$nodes" --no-kill \
    bash -c "$setup"' && exec "$@"' draft "${worker[@]}" </dev/null &
  if $dry_run; then wait; fi
  command+=("--draft=$draft" "--draft_placement=remote:$host:$port" "--draft_tls_ca=$directory/worker.pem")
  command+=("--draft_token_file=$directory/token")
fi
# Each task knows its number. shellcheck cannot know that it is to expand there.
# shellcheck disable=SC2016
task="$setup"' && exec "$0" "$SLURM_PROCID" auto "$@"'
run srun "--nodes=$nodes" "--ntasks=$nodes" --relative=0 --kill-on-bad-exit=1 \
  bash -c "$task" "$here/host.sh" "${command[@]}"
