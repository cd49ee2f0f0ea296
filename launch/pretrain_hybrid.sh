#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pretrain Megatron's HybridModel, of attention, MLP and Mamba layers, with or without SimReg; one file, two ways to start it:
#   bash launch/pretrain_hybrid.sh --simreg-lambda 1        finds Python and starts torchrun itself
#   torchrun launch/pretrain_hybrid.sh --simreg-lambda 1    torchrun runs it as Python on every rank
# Without --model it is the tiny model. Lambda 1 is for that; at a width of 1024 it is 10 (--simreg-lambda auto).
# In bash the next line does nothing; in Python it opens a string, which ends below the bash part.
''':'
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started by another shell: sh launch/pretrain_hybrid.sh
# shellcheck source=launch/start.bash
source "$(dirname -- "${BASH_SOURCE[0]}")/start.bash"
start "${BASH_SOURCE[0]}" "$@" # never returns: torchrun takes the place of this shell
# shellcheck disable=SC2288,SC2317 # the Python part, for bash one long unreachable word
'''
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch.launcher import main

if __name__ == "__main__":
    main("hybrid")
# The quote that ends this line is the one that bash still waits for. '
