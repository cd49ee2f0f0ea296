#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Transformer Engine's and Megatron-Bridge's released packages next to Megatron, without a GPU, and the tests that need them.
#
#   tools/te_on_cpu.sh [PYTEST OPTIONS]      make build/te-venv if it is not there, then run tests/te in it
#
# TE_VENV=FOLDER puts the environment elsewhere. It is a copy of .venv (hard links where both are on one disk), so `make
# setup` comes first. Transformer Engine builds models and reads checkpoints there; no layer of it can run on a CPU.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TE_VENV:-$root/build/te-venv}
python=$venv/bin/python
origin=$venv/te-origin # says that this script made it; there from the first moment
stamp=$venv/te-stamp   # which recipe was followed; there only after the whole of it
te=2.20.2
bridge=0.6.2

say() { printf 'test-te: %s\n' "$*" >&2; }
skip() {
  say "skipped: $*"
  exit 0
}
fail() {
  say "$*"
  exit 1
}

ask() { "$python" -c "import sysconfig, torch; print($1)"; }

# install REQUIREMENT...: by pip as it is configured; what cannot be fetched ends in a skip, not in a failure.
install() {
  PIP_USER=0 "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$root/constraints.txt" "$@" ||
    skip "pip could not install ${!#} (its own words are above): check the network or the mirror (PIP_INDEX_URL)"
}

copy_environment() {
  say "copying .venv to $venv"
  rm -rf "$venv"
  mkdir -p "$venv"
  : >"$origin"
  cp -al "$root/.venv/." "$venv" 2>/dev/null || cp -a "$root/.venv/." "$venv"
  rm -f "$venv"/simreg-*
}

# The kernels come as a wheel. What binds them to torch is published as C++, for which wheels bring all headers of CUDA.
install_transformer_engine() {
  local cuda
  cuda=$(ask torch.version.cuda)
  say "installing Transformer Engine $te (0.5 GB)"
  install --no-deps "transformer-engine==$te" "transformer-engine-cu13==$te"
  install setuptools wheel nvdlfw-inspect onnx onnxscript
  install --no-deps "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"
  PIP_USER=0 "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --no-binary :all: --dest "$venv/source" "transformer-engine-torch==$te" ||
    skip "pip could not fetch the source of transformer-engine-torch (its own words are above)"
  tar -xzf "$venv/source/transformer_engine_torch-$te.tar.gz" -C "$venv/source"
}

# All of its C++ as one unit, and not optimized: a minute instead of many. pybind.cpp needs what the others declare.
compile_extension() {
  local site source suffix folder headers=()
  site=$(ask 'sysconfig.get_paths()["purelib"]')
  suffix=$(ask 'sysconfig.get_config_var("EXT_SUFFIX")')
  source=$venv/source/transformer_engine_torch-$te
  for folder in "$site"/nvidia/*/include "$site"/nvidia/cu*/include/cccl "$site"/torch/include{,/torch/csrc/api/include} \
    "$(ask 'sysconfig.get_paths()["include"]')"; do
    if [ -d "$folder" ]; then headers+=(-isystem "$folder"); fi
  done
  say "compiling its bindings to torch (a minute, or a few)"
  (
    cd "$source/csrc"
    { find . -name '*.cpp' ! -name pybind.cpp | LC_ALL=C sort && echo ./extensions/pybind.cpp; } |
      sed 's/.*/#include "&"/' >../all.cpp
    mkdir -p "$site/transformer_engine/wheel_lib"
    g++ -std=c++20 -O0 -g0 -w -fPIC -shared -fvisibility=hidden \
      -DTORCH_EXTENSION_NAME=transformer_engine_torch -DTORCH_API_INCLUDE_EXTENSION_H \
      -I../common_headers -I../common_headers/common -I../common_headers/common/include -I. "${headers[@]}" \
      ../all.cpp -L"$site/torch/lib" -lc10 -ltorch -ltorch_cpu -ltorch_python \
      -o "$site/transformer_engine/wheel_lib/transformer_engine_torch$suffix"
  ) || fail "Transformer Engine's C++ could not be compiled (g++'s own words are above)."
}

# Of Bridge's requirements, those that its training loop imports: the others are for its recipes of other models.
install_bridge() {
  local site
  site=$(ask 'sysconfig.get_paths()["purelib"]')
  say "installing Megatron-Bridge $bridge"
  install --no-deps "megatron-bridge==$bridge"
  install omegaconf peft megatron-energon nvidia-modelopt httpx 'transformers>=5.8,<=5.12.1'
  # Its wheels ask for glibc 2.39 and hold nothing but Python; an older system is offered 0.4.1, too old for Megatron.
  install --no-deps --only-binary :all: --platform "manylinux_2_39_$(uname -m)" --target "$site" --upgrade \
    'nvidia-resiliency-ext==0.7.*'
}

make_environment() {
  [ -e "$root/.venv/simreg-stamp" ] || fail "there is no .venv to start from: run 'make setup' first."
  # A moved checkout, or another Python in .venv, needs another environment.
  recipe="$root $("$root/.venv/bin/python" -V || true)"
  recipe+=" $(sha256sum "$root/.venv/simreg-stamp" "${BASH_SOURCE[0]}" | cut -c1-64 | tr '\n' ' ')"
  if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$recipe" ]; then return 0; fi
  if [ -e "$venv" ] && [ ! -e "$origin" ]; then
    fail "$venv was not made by this script and will not be overwritten: name another folder with TE_VENV=."
  fi
  command -v g++ >/dev/null || skip "there is no g++, which compiles Transformer Engine's bindings to torch"
  case "$("$root/.venv/bin/python" -c 'import torch; print(torch.version.cuda)')" in
    13.*) ;;
    *) skip "the torch in .venv is not built for CUDA 13, for which Transformer Engine $te is tried here" ;;
  esac
  copy_environment
  install_transformer_engine
  compile_extension
  install_bridge
  # Last and alone: torch demands exactly its own cuBLAS, in which Transformer Engine misses a function.
  install --no-deps 'nvidia-cublas>=13.2,<13.3'
  "$python" -c 'import torch, transformer_engine.pytorch' || fail "Transformer Engine $te was built and cannot be imported."
  printf '%s\n' "$recipe" >"$stamp"
}

make_environment
cd "$root"
export VIRTUAL_ENV=$venv # the launch scripts take its Python
exec "$python" -m pytest -q -m te "$@" tests/te
