# SPDX-License-Identifier: Apache-2.0
"""What a training loop other than Megatron's own tells the plugin; see `simreg_megatron.loop`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from simreg_megatron.plugin import bypass, compat, installation
from simreg_megatron.plugin.before_training import make_ready
from simreg_megatron.plugin.loop_hooks import reduced_means
from simreg_megatron.plugin.refusals import num_data_ranks, refuse_models, refuse_rows, refuse_settings, refuse_silence
from simreg_megatron.weights import learnable


def begin_run(models: Any, *, micro_batch_size: int | None = None, seq_length: int | None = None) -> None:
    """See `simreg_megatron.loop.begin_run`."""
    here = installation.current()
    regularizer = here.begin_run()
    config = regularizer.config
    if not config.active:
        return
    chunks = models if isinstance(models, list) else [models]
    refuse_models(config, chunks, here.model_classes)
    for model in compat.unwrapped(chunks):
        refuse_settings(model.config, config)
        refuse_rows(
            config,
            width=model.config.hidden_size,
            num_sequences=micro_batch_size,
            num_data_ranks=functools.partial(num_data_ranks, model),
        )
        learnable.refuse_without(config, model)
        bypass.watch(model)
    make_ready(regularizer, chunks, compat.unwrapped(chunks)[0].config, micro_batch_size, seq_length)


def end_step(models: Any, *, reduces: bool) -> dict[str, Any]:
    """See `simreg_megatron.loop.end_step`."""
    regularizer = installation.regularizer()
    if not regularizer.config.active:
        return {}
    refuse_silence(regularizer, models)
    return reduced_means(compat.unwrapped(models)[0]) if reduces else {}


@contextmanager
def paused() -> Iterator[None]:
    """Models train as plain Megatron trains them in here."""
    here = installation.current()
    here.paused = True
    try:
        yield
    finally:
        here.paused = False


@contextmanager
def random_numbers_of_before() -> Iterator[None]:
    """Whatever is drawn in here is drawn again afterwards."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    on_cpu, of_megatron = torch.get_rng_state(), dict(get_cuda_rng_tracker().get_states())
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        get_cuda_rng_tracker().set_states(of_megatron)
