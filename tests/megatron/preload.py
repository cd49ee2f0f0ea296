# SPDX-License-Identifier: Apache-2.0
"""What every rank needs in memory: imported once, by the fork server, before any rank is forked.

It starts no thread and makes no process group, which is what keeps forking sound, and it attaches nothing of SimReg to
Megatron, so that a plain rank stays plain.
"""

from __future__ import annotations

import contextlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; a pool of threads would not survive the fork

from simreg_megatron.plugin import cpu_backend

with contextlib.redirect_stdout(None):  # its sentence would reach the console and no run's log
    cpu_backend.activate()

import torch._dynamo  # the first process group would import it  # noqa: F401

import simreg_megatron.data.indexed
import simreg_megatron.plugin.hooks
import simreg_megatron.pretrain  # noqa: F401
