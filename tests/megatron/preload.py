# SPDX-License-Identifier: Apache-2.0
"""What every rank needs in memory: imported once, by the fork server, before any rank is forked.

It starts no thread and makes no process group, which is what keeps forking sound, and it attaches nothing of SimReg to
Megatron, so that a plain rank stays plain.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from simreg_megatron.plugin.cpu import backend as cpu_backend

_MODULES = (
    "megatron.training.training",
    "megatron.core.tokenizers.text",  # else each rank would import it for its tokenizer, with all of transformers
    "torch._dynamo",  # the same for its first process group
    "simreg_megatron.data.indexed",
    "simreg_megatron.plugin.hooks",
    "simreg_megatron.pretrain",
)

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; a pool of threads would not survive the fork
with contextlib.redirect_stdout(None):  # its sentence would reach the console and no run's log
    cpu_backend.activate()
for module in _MODULES:
    importlib.import_module(module)
