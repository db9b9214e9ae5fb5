# What the launch scripts share, most of it checks of their arguments; they set `script`, their name, and source this.
# shellcheck shell=bash

refuse() {
  # shellcheck disable=SC2154
  echo "$script: $1; see --help" >&2
  exit 2
}

flags() { # NAMES ARGUMENT...: sets the variables of those names by --NAME=VALUE, and `taken`, how many
  local _names=" $1 " _name
  shift
  taken=0
  while [[ ${1:-} == --* ]]; do
    _name=${1%%=*}
    _name=${_name#--}
    if [[ $1 == --dry_run ]]; then
      dry_run=true
    elif [[ $1 == --help ]]; then
      usage
      exit 0
    elif [[ $1 == *=* && $_names == *" $_name "* ]]; then
      printf -v "$_name" %s "${1#*=}"
    else
      refuse "unknown flag $1"
    fi
    shift
    ((++taken))
  done
}

run() { # COMMAND...: runs it, or prints it in a dry run
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

end_jobs() { # for a trap, in a script with `set -m`: each of its jobs is a group with its own children
  # Nothing is local: after an interrupt in a function bash runs the trap outside of any.
  for _job in $(jobs -p); do
    kill -- "-$_job" 2>/dev/null || true
  done
}

needs() { # PROGRAM REMEDY
  command -v "$1" >/dev/null || refuse "$1 is not on PATH: $2, or see by --dry_run what would run"
}

given() { # NAME VALUE
  if [[ -z $2 ]]; then
    refuse "$1 is missing"
  fi
}

number() { # NAME VALUE
  given "$1" "$2"
  if [[ ! $2 =~ ^[1-9][0-9]*$ ]]; then
    refuse "$1=$2 is no number from 1 on"
  fi
}

port() { # VALUE LAST
  number --port "$1"
  if ((${#1} > 5 || $1 > $2)); then
    refuse "--port=$1 is no port: 1 to $2"
  fi
}

of_draft() { # NAME ...: flags, whose variables have the same names
  local name
  for name in "$@"; do
    if [[ -n ${!name} && -z $draft ]]; then
      refuse "--$name is of a draft; give --draft"
    fi
  done
}

target_of() { # COMMAND...: sets `target`: a draft that takes tensors from it needs to know which
  local config=''
  target=''
  while (($#)); do
    case $1 in
      --target=* | -target=*) target=${1#*=} ;;
      --target | -target) target=${2:-} ;;
      --config=* | -config=* | --config | -config) config=yes ;;
    esac
    shift
  done
  if [[ -n $draft && -n $config && -z $target ]]; then
    refuse 'a draft worker reads no --config; give --target beside it'
  fi
}
