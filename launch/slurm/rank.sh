#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One process of a job step: SLURM's names for its place become torch's, then Python takes over and gets the signals.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS GROUP_RANK=$SLURM_NODEID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
exec "$PYTHON" "$@"
