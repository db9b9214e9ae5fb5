#!/usr/bin/env bash
# tests/try_wheel.sh PYTHON WHEEL MODE...: installs a wheel in a fresh environment and decodes SmolLM2 in these modes
# (sd, ssd), outside the checkout and without a compiler. The text must be that of AR, and the missing compiler must be
# said.
set -euo pipefail
python=$1
wheel=$(realpath "$2")
shift 2
XDG_CACHE_HOME=$(dirname "$wheel")/cache # no library that an earlier start compiled is in it
export XDG_CACHE_HOME
directory=$(mktemp -d) all=$PATH
trap 'PATH=$all; rm -rf "$directory"' EXIT
cd "$directory"
"$python" -m venv environment
environment/bin/python -m pip install --quiet --disable-pip-version-check "$wheel"
mkdir tools # in which there is no compiler
ln -s "$(command -v uname)" tools/
export PATH=$directory/tools JAX_PLATFORMS=cpu
unset PYTHONPATH

fail() {
  echo "tests/try_wheel.sh: $("$directory/environment/bin/python" --version): $1" >&2
  [[ ! -s messages ]] || "$directory/environment/bin/python" -c 'print(open("messages").read())' >&2
  exit 1
}

answer() { # MODE: its answer; what it says otherwise is in `messages`
  environment/bin/ssd-jax generate "--mode=$1" "${@:2}" --max_tokens=48 --prompt='List the four seasons of the year.' \
    2>messages || fail "generate --mode=$1 failed"
}

version=$(environment/bin/ssd-jax --version)
[[ $wheel == *"-${version##* }-"* ]] || fail "the wheel is $wheel, and --version says $version"
expected=$(answer ar)
[[ $expected == *Winter* ]] || fail "AR answers: $expected"
[[ $(<messages) == *"no C++ compiler"* ]] || fail 'nothing says that there is no compiler, so what is slower'
for mode in "$@"; do
  settings=(--draft=default)
  [[ $mode != ssd ]] || settings+=(--budget=4) # one number of branches compiles in half the time of three
  text=$(answer "$mode" "${settings[@]}")
  [[ $text == "$expected" ]] || fail "$mode answers: $text; AR: $expected"
done
echo "$("$directory/environment/bin/python" --version): $version from ${wheel##*/} answers in ar $*"
