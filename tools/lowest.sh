#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The quick tests with the lowest version that setup.py allows of everything it names. `make setup` takes the newest.
#
#   tools/lowest.sh [PYTEST OPTIONS]      make build/lowest-venv if it is not there or setup.py changed, then run them
#
# uv chooses (--resolution lowest-direct), and follows pip's configuration, as in tools/setup.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LOWEST_VENV:-$root/build/lowest-venv}
python=$venv/bin/python
stamp=$venv/lowest-stamp
uv=$root/.venv/bin/uv

say() { printf 'test-lowest: %s\n' "$*" >&2; }

make_environment() {
  local recipe given name value
  # A moved checkout, or another Python in .venv, needs another environment.
  recipe="$root $("$root/.venv/bin/python" -V 2>/dev/null || true)"
  recipe+=" $(sha256sum "$root/setup.py" "${BASH_SOURCE[0]}" | cut -c1-64 | tr '\n' ' ')"
  if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$recipe" ]; then return 0; fi
  if [ -e "$venv" ] && [ ! -e "$stamp" ]; then
    say "$venv was not made by this script and will not be overwritten: name another folder with LOWEST_VENV="
    exit 1
  fi
  given=$(PIP_USER=0 "$root/.venv/bin/python" -m pip config list |
    "$root/.venv/bin/python" "$root/tools/uv_settings.py") || {
    say "pip has a setting that uv does not know (named above): unset it for this command"
    exit 1
  }
  say "installing the lowest versions into $venv"
  "$uv" venv --quiet --clear --python "$root/.venv/bin/python" "$venv"
  touch "$stamp"
  while IFS='=' read -r name value; do
    if [ -n "$name" ]; then export "$name=$value"; fi
  done <<<"$given"
  # Of what setup.py does not name uv takes the newest, and the lowest transformers goes with no hub of these days.
  "$uv" pip install --quiet --python "$python" --index-strategy unsafe-best-match --resolution lowest-direct \
    "huggingface-hub>=0.34,<1" --editable "${root}[demo,dev]"
  printf '%s\n' "$recipe" >"$stamp"
}

if [ ! -x "$uv" ]; then
  say "skipped: uv, which chooses the versions, is not in .venv"
  [ -z "${CI:-}" ] || exit 1 # in CI no one reads what was skipped
  exit 0
fi
make_environment
cd "$root"
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH # the launch scripts take its Python
# Each file in a process of its own: workers that live on do not survive what an old torch does to its forks.
one_file() {
  local log status=0
  log=$(mktemp)
  "$python" -m pytest -q -p no:cacheprovider -m "not slow and not gpu and not slurm and not te" "${@:2}" "$1" \
    >"$log" 2>&1 || status=$?
  printf '%s: %s\n' "$1" "$(tail -n 1 "$log")"
  [ "$status" = 0 ] || [ "$status" = 5 ] || { cat "$log" && rm "$log" && return 1; } # 5: nothing left to run
  rm "$log"
}
export -f one_file
export python
find tests -name 'test_*.py' | sort | xargs -P 2 -I {} bash -c 'one_file "$@"' one_file {} "$@" \
  && say "all files passed"
