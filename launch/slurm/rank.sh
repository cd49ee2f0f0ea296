#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One process of a job step: SLURM's names for its place become torch's, then Python takes over and gets the signals.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS GROUP_RANK=$SLURM_NODEID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
# SLURM hands on the limits of the shell that submitted: 1024 open files are too few for gloo, which connects each rank to
# all others in three groups, and one core dump a rank fills a disk.
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
ulimit -S -c 0
# Triton compiles once a node: a home folder that all nodes share is slow at that, and fails when many write at once.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-$(id -u)}
exec "$PYTHON" "$@"
