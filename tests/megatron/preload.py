# SPDX-License-Identifier: Apache-2.0
"""Imports that every rank needs in memory: imported once, by the fork server, before any rank is forked.

It starts no thread, makes no process group, and attaches nothing of SimReg to Megatron: a plain rank stays plain.
"""

import argparse
import contextlib
import functools
import importlib
import os
import warnings

from simreg_megatron.cpu import backend as cpu_backend

_MODULES = (
    "megatron.training.training",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",  # else each rank would import it, with all of transformers
    "torch._dynamo",  # the same for its first process group
    "simreg_megatron.tools.tokens",
    "simreg_megatron.plugin.hooks",
    "simreg_megatron.pretrain",
    "simreg_megatron.parallel.sequence",
    "torch.utils.serialization.config",
    "pytest",  # the modules of the functions that ranks run need it
)

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; a pool of threads would not survive the fork
with contextlib.redirect_stdout(None):  # its sentence would reach the console and no run's log
    cpu_backend.activate()
with warnings.catch_warnings(action="ignore"):  # of Megatron about itself
    for module in _MODULES:
        importlib.import_module(module)

# Megatron reads the help of its flags out of its own source, again for every parser: half of what a tiny run computes.
from megatron.training import arguments  # noqa: E402
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402

ArgumentGroupFactory._get_field_docstrings = staticmethod(
    functools.cache(functools.partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
)
arguments.add_megatron_arguments(argparse.ArgumentParser())
