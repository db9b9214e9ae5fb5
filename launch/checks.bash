# What the launch scripts ask of their arguments; they set `script`, their name, and source this.
# shellcheck shell=bash

refuse() {
  # shellcheck disable=SC2154
  echo "$script: $1; see --help" >&2
  exit 2
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
