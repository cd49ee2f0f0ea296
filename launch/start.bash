# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# The bash half of launch/pretrain_*.sh: find a Python that can train, read torchrun's flags, start torchrun.
unset CHECK # one from the environment would be taken for that of find_python
ALONE='import sys; sys.path = [*filter(None, sys.path)]; ' # no modules of the working folder, as in a script

# find_python ROOT MODULE...: the first Python that can import what the run needs, in PYTHON; it is run before it is
# believed. CHECK, if set, are its words to check the flags first: to import torch takes seconds.
find_python() {
  local root=$1 candidate
  shift
  local candidates=("$root/.venv/bin/python" python3)
  if [[ -n ${VIRTUAL_ENV:-} ]]; then
    candidates=("$VIRTUAL_ENV/bin/python" "${candidates[@]}")
  fi
  # find_spec looks without importing: torch alone takes seconds, and torchrun imports it anyway.
  local probe=$ALONE'import importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'
  for candidate in "${candidates[@]}"; do
    "$candidate" -c "$probe" "$@" >/dev/null 2>&1 || continue
    if [[ -v CHECK ]]; then
      PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$candidate" "${CHECK[@]}" || exit 2
    fi
    if "$candidate" -c "${ALONE}import $1" >/dev/null 2>&1; then
      PYTHON=$candidate
      return
    fi
  done
  echo "error: no Python with ${*/%megatron/megatron-core} was found: run \`make setup\` in $root," \
    "or activate the environment that has them" >&2
  exit 2
}

# Split the words into torchrun's and the script's: TORCHRUN and SCRIPT_WORDS.
split_words() {
  TORCHRUN=()
  SCRIPT_WORDS=()
  local word name
  while (($#)); do
    word=$1
    shift
    name=${word%%=*}
    case ${name//_/-} in
      --nproc-per-node | --nnodes | --node-rank | --master-addr | --master-port | --rdzv-* | --shutdown-timeout)
        if [[ $word != *=* ]]; then
          if ((!$#)) || [[ $1 == --* ]]; then
            echo "error: $word needs a value" >&2
            exit 2
          fi
          word+="=$1"
          shift
        fi
        TORCHRUN+=("$word")
        ;;
      --standalone) TORCHRUN+=("$word") ;;
      *) SCRIPT_WORDS+=("$word") ;;
    esac
  done
}

# Whether a flag is among torchrun's words, in either spelling.
given() {
  local word
  for word in "${TORCHRUN[@]+"${TORCHRUN[@]}"}"; do
    word=${word%%=*}
    if [[ ${word//_/-} == "$1" || ${word//_/-} == "$1"-* ]]; then
      return 0
    fi
  done
  return 1
}

# What the command line leaves open comes from the environment, then from the machine.
complete_torchrun() {
  fill_torchrun
  local word
  for word in "${TORCHRUN[@]}"; do
    if [[ $word =~ ^--n(proc.per.node|nodes)= && ! $word =~ =([1-9][0-9]*(:[1-9][0-9]*)?|auto|gpu|cpu)$ ]]; then
      echo "error: ${word%%=*} takes a positive number, not ${word#*=}" >&2
      exit 2
    fi
  done
}

fill_torchrun() {
  local -A variables=([--nnodes]=NNODES [--node-rank]=NODE_RANK [--master-addr]=MASTER_ADDR [--master-port]=MASTER_PORT)
  local flag variable
  # torchrun reads PET_NNODES and the like itself, as pods of Kubeflow set them; they come before the names above.
  for flag in --nproc-per-node --nnodes --node-rank --master-addr --master-port --rdzv-backend --rdzv-endpoint --rdzv-id; do
    variable=${flag#--}
    variable=PET_${variable//-/_}
    variable=${variable^^}
    if ! given "$flag" && [[ -n ${!variable:-} ]]; then
      TORCHRUN+=("$flag=${!variable}")
    fi
  done
  given --nproc-per-node || TORCHRUN+=("--nproc-per-node=${NPROC_PER_NODE:-$(count_gpus)}")
  given --standalone && return
  for flag in --nnodes --node-rank --master-addr --master-port; do
    variable=${variables[$flag]}
    if ! given "$flag" && [[ -n ${!variable:-} ]]; then
      TORCHRUN+=("$flag=${!variable}")
    fi
  done
  # One machine and no address: torchrun picks a free port itself, so that two runs can stand side by side.
  if ! given --master && ! given --rdzv && { ! given --nnodes || [[ " ${TORCHRUN[*]} " == *" --nnodes=1 "* ]]; }; then
    TORCHRUN+=(--standalone)
  fi
}

# Several nodes that know no address would wait for each other for ever.
demand_address() {
  if given --nnodes && ! given --master-addr && ! given --rdzv-endpoint && ! given --standalone && [[ " ${TORCHRUN[*]} " != *" --nnodes=1 "* ]]; then
    echo "error: several nodes need the address of the first: give --master-addr HOST and each its --node-rank," \
      "or --rdzv-backend c10d --rdzv-endpoint HOST:PORT" >&2
    exit 2
  fi
}

count_gpus() {
  "$PYTHON" -c "$ALONE"'import torch; print(max(1, torch.cuda.device_count()))'
}

# A dry run needs no ranks, only their number: one process, and errors without torchrun's report under them. What
# torchrun would tell its processes of this node's place, and of where the nodes meet, stands in the command it prints.
plan_alone() {
  local word name processes=1 nodes=1
  for word in "${TORCHRUN[@]}"; do
    name=${word%%=*}
    case ${name//_/-} in
      --nproc-per-node) processes=${word#*=} ;;
      --nnodes) nodes=${word#*=} ;;
      --node-rank) export GROUP_RANK=${word#*=} ;;
      --master-addr) export MASTER_ADDR=${word#*=} ;;
      --master-port) export MASTER_PORT=${word#*=} ;;
      --rdzv-backend | --rdzv-endpoint | --rdzv-id | --rdzv-conf)
        name=${name//-/_}
        name=PET_${name#__}
        export "${name^^}=${word#*=}"
        ;;
    esac
  done
  if [[ $processes =~ ^[0-9]+$ && $nodes =~ ^[0-9]+$ ]]; then
    export RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((processes * nodes)) LOCAL_WORLD_SIZE=$processes
    exec "$PYTHON" "$1" "${SCRIPT_WORDS[@]}"
  fi
}

start() {
  local script=$1 root word
  shift
  root=$(CDPATH="" cd -- "$(dirname -- "$script")/.." && pwd) || exit 2
  split_words "$@"
  CHECK=("$root/launch/preflight.py" "$script" "${SCRIPT_WORDS[@]+"${SCRIPT_WORDS[@]}"}")
  find_python "$root" torch megatron sentencepiece
  for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then
      exit 0 # CHECK has printed it
    fi
  done
  complete_torchrun
  for word in "$@"; do
    if [[ $word == --dry-run ]]; then
      plan_alone "$script"
    fi
  done
  demand_address
  ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true # gloo connects every rank with all others, in several groups
  exec "$PYTHON" "$root/launch/agent.py" "${TORCHRUN[@]}" "$script" "${SCRIPT_WORDS[@]+"${SCRIPT_WORDS[@]}"}"
}
