#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One process of a job step: SLURM's names for its place become torch's, then Python takes over and gets the signals.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS GROUP_RANK=$SLURM_NODEID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
# The 1024 open files of the shell that submitted are too few for gloo, and one core dump a rank fills a disk.
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
ulimit -S -c 0
# Triton compiles once a node, as a shared home folder is slow; in /tmp another user may have made a folder of that name.
cache=/tmp/triton-$(id -u)
mkdir -m 700 "$cache" 2>/dev/null || [[ -d $cache && ! -L $cache && -O $cache ]] || cache=$(mktemp -d)
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache}
exec "$PYTHON" "$@"
