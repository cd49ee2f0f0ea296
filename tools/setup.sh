#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv with all that the demo and the tests need. Called by `make setup`; a no-op if nothing changed.
#
#   tools/setup.sh                 find a Python, make .venv, install
#   tools/setup.sh --find-python   only print the interpreter that would be used
#
# PYTHON=/path/to/python3.12 names the interpreter. Everything about packages (a mirror, CPU-only wheels,
# constraints) is pip's own configuration: the PIP_* variables and pip.conf are left as they are. uv, which is
# several times faster, follows the same configuration and does the work where it can be had; INSTALLER=pip leaves it out.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
origin=$venv/simreg-origin # which Python and which folder .venv was made for; there from the first moment
stamp=$venv/simreg-stamp   # which recipe was installed; there only after a whole installation

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

# --- Find a Python --------------------------------------------------------------------------------

# Prints a verdict and the interpreter behind the candidate: the base of a virtual environment, or what a shim
# leads to. Pythons of any age run it, so it keeps to what all of them understand. megatron-core 0.19.2 has
# wheels for CPython 3.12 and 3.13 with the usual lock; any other would have to compile it.
probe='
import sys
verdict = "old"
if sys.version_info[:2] >= (3, 12) and sys.implementation.name == "cpython":
    import sysconfig
    free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
    verdict = "no-wheel" if sys.version_info[:2] > (3, 13) or free_threaded else "fit"
    try:
        import ensurepip, venv
    except ImportError:
        verdict = "no-venv"
print(verdict + " " + (getattr(sys, "_base_executable", None) or sys.executable))
'
found="" without_wheel="" without_venv=""

# consider CANDIDATE: run it and believe only what it answers (a pyenv shim may be there and end with 127).
consider() {
  local answer verdict path
  answer=$("$1" -c "$probe" 2>/dev/null </dev/null) || return 1
  read -r verdict path <<<"$answer"
  case "$verdict" in
    fit) found=$path && return 0 ;;
    no-wheel) without_wheel=${without_wheel:-$path} ;;
    no-venv) without_venv=${without_venv:-$path} ;;
  esac
  return 1
}

# consider_each: the same for every line of standard input, until one is fit.
consider_each() {
  local candidate
  while IFS= read -r candidate; do
    if [ -n "$candidate" ] && consider "$candidate"; then return 0; fi
  done
  return 1
}

# on_path NAME: every executable of that name, not only the first, which may be a shim that leads nowhere.
on_path() { type -aP "$1" 2>/dev/null || true; }

# of_pyenv MINOR: the interpreters of that minor version that pyenv has built, the newest first.
of_pyenv() {
  local pyenv_root=${PYENV_ROOT:-}
  if [ -z "$pyenv_root" ]; then pyenv_root=$(pyenv root 2>/dev/null) || pyenv_root=${HOME:-}/.pyenv; fi
  printf '%s\n' "$pyenv_root"/versions/"$1"*/bin/python3 | sort -rV
}

of_uv() { uv python find --system 3.12 2>/dev/null || true; }

brought_by_uv() {
  command -v uv >/dev/null || return 0
  say "no Python 3.12 on this machine yet: asking uv for one"
  uv python install 3.12 >&2 || return 0
  of_uv
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    if consider "$PYTHON"; then return 0; fi
    if [ -n "$without_wheel" ]; then take_without_wheel && return 0; fi
    fail "PYTHON=$PYTHON does not run, or is not CPython 3.12 or 3.13 with the venv and ensurepip modules:" \
      "name one that is, or unset PYTHON and let this script look for one."
  fi
  local name
  for name in python3.12 python3.13 python3; do
    if consider_each < <(on_path "$name"); then return 0; fi
  done
  for name in 3.12. 3.13.; do
    if consider_each < <(of_pyenv "$name"); then return 0; fi
  done
  if consider_each < <(of_uv) || consider_each < <(brought_by_uv); then return 0; fi
  settle_for_less
}

take_without_wheel() {
  found=$without_wheel
  say "megatron-core 0.19 has wheels for CPython 3.12 and 3.13, none for $without_wheel:" \
    "pip will try to compile it; if that fails, install Python 3.12."
}

# Nothing fits: take a Python without a wheel and say so, or end with the nearest remedy.
settle_for_less() {
  if [ -n "$without_wheel" ]; then
    take_without_wheel
  elif [ -n "$without_venv" ]; then
    fail "$without_venv is new enough but lacks the venv and ensurepip modules:" \
      "install them (on Debian and Ubuntu: apt install python3.12-venv) and run this again."
  else
    fail "no Python 3.12 or 3.13 was found on PATH, in pyenv or through uv: install one" \
      "(apt install python3.12 python3.12-venv, or pyenv install 3.12, or uv python install 3.12)," \
      "or name it with PYTHON=/path/to/python3.12."
  fi
}

# --- Make .venv and install -----------------------------------------------------------------------

# origin_of PYTHON: one line that changes when .venv must be made again: another minor version, a moved folder.
origin_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.argv[1])' "$root" 2>/dev/null; }

# recipe: one line that changes when the packages have to be installed again.
recipe() {
  "$venv/bin/python" -c 'import hashlib, sys
print(hashlib.sha256(b"".join(open(path, "rb").read() for path in sys.argv[1:])).hexdigest())' \
    "$root/setup.py" "$root/constraints.txt" "$root/tools/setup.sh" 2>/dev/null
}

holds() { [ -n "$2" ] && [ -e "$1" ] && [ "$(cat "$1")" = "$2" ]; } # holds FILE LINE

# The .venv that is there is the wanted one: it runs, was made here, and is of the version PYTHON asks for.
is_ours() {
  holds "$origin" "$(origin_of "$venv/bin/python")" &&
    holds "$origin" "$(origin_of "${PYTHON:-$venv/bin/python}")"
}
is_done() { is_ours && holds "$stamp" "$(recipe)"; }

# take_lock: one set-up at a time. The lock is the kernel's and goes with this process, however that ends.
take_lock() {
  exec 9>"$root/.venv.lock" ||
    fail "cannot write in $root: make it writable, or clone the repository elsewhere."
  "$found" -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.stderr.write("setup: another set-up is at work here; waiting for it\n")
    fcntl.flock(9, fcntl.LOCK_EX)'
}

make_venv() {
  if is_ours; then return 0; fi
  if [ -e "$venv" ] && [ ! -e "$origin" ]; then
    fail "$venv was not made by this script, and will not be overwritten: move it away, or remove it with" \
      "'rm -rf .venv', and run this again."
  fi
  say "making $venv with $found"
  rm -rf "$venv"
  mkdir "$venv"
  origin_of "$found" >"$origin"
  "$found" -m venv "$venv" ||
    fail "$found could not make a virtual environment (its own words are above): install its venv module" \
      "(on Debian and Ubuntu: apt install python3.12-venv), or name another interpreter with PYTHON=."
}

# by_uv: install with uv, with pip's configuration; fails where it cannot be had, cannot follow, or does not manage.
by_uv() {
  local given name value
  [ "${INSTALLER:-uv}" = uv ] || return 1
  PIP_USER=0 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv 2>/dev/null || return 1
  given=$(PIP_USER=0 "$venv/bin/python" -m pip config list | "$venv/bin/python" "$root/tools/uv_settings.py") || {
    say "pip has a setting that uv does not know, so pip installs"
    return 1
  }
  (
    while IFS='=' read -r name value; do
      if [ -n "$name" ]; then export "$name=$value"; fi
    done <<<"$given"
    # As pip does, the best version of all indexes together.
    "$venv/bin/uv" pip install --python "$venv/bin/python" --index-strategy unsafe-best-match --compile-bytecode \
      --constraint "$root/constraints.txt" --editable "${root}[demo,dev]"
  ) || {
    say "uv could not install them (its own words are above), so pip tries"
    return 1
  }
}

by_pip() {
  # PIP_USER would send the packages out of .venv; the rest of pip's configuration stays.
  PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$root/constraints.txt" \
    --editable "${root}[demo,dev]"
}

# Both are silent while they unpack what they have fetched, for half of the time.
tell_size() {
  local used
  command -v du >/dev/null && command -v sleep >/dev/null || return 0
  while sleep 10 >/dev/null 2>&1; do
    used=$(du -sm "$venv" 2>/dev/null) || continue
    say "${used%%[!0-9]*} of about 6200 MB are there"
  done
}

install() {
  local installed teller
  installed=$(recipe) # before, so that an edit made meanwhile is seen the next time
  rm -f "$stamp"
  say "installing the packages: 1 to 4 minutes and 6.2 GB of disk, most of it torch with CUDA"
  tell_size 9>&- & # without the lock, which a sleep would hold for ten seconds more
  teller=$!
  # shellcheck disable=SC2064 # the number, as the name is gone by then
  trap "kill $teller 2>/dev/null || :" EXIT
  by_uv || by_pip ||
    fail "pip could not install the packages (its own words are above): check the network or the mirror" \
      "(PIP_INDEX_URL) and the free disk (7 GB), and run 'make setup' again."
  kill "$teller" 2>/dev/null || :
  trap - EXIT
  printf '%s\n' "$installed" >"$stamp"
  say "done in $SECONDS s"
}

main() {
  case "${1:-}" in
    "") ;;
    --find-python) find_python && printf '%s\n' "$found" && return 0 ;;
    *) fail "unknown option $1: the only one is --find-python." ;;
  esac
  if is_done; then return 0; fi
  find_python
  take_lock
  if is_done; then return 0; fi # the one that was waited for did it
  make_venv
  install
}

main "$@"
