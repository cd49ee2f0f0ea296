# SPDX-License-Identifier: Apache-2.0
"""Terms of layers that lie on pipeline stages before the last one.

Such a stage has neither labels nor a loss. It reads the labels itself: a data loader gives every rank of a
data-parallel index the same micro-batches in the same order, so nothing is sent between stages and none waits for
another. And its backward begins with the gradient that the next stage sends, so the factor that Megatron puts before
each token's language-model loss is made here, from what its own schedule does on the last stage:

    weight_i = mask_i * loss scale                                            with --calculate-per-token-loss
    weight_i = mask_i * loss scale / (tokens of the micro-batch * micro-batches)       else

(Megatron's MoE auxiliary losses are scaled in the same place, by `MoEAuxLossAutoScaler.set_loss_scale`; what divides
gradients after the backward, the tokens of the global batch and the data-parallel mean, reaches all stages alike.)
At log time agreement.py compares that weight, and the labels, with those that the last stage really had.

Shapes: T tokens of a sequence, S tokens of this context rank, B micro-batch, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import log_once
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.plugin import compat, inner
from simreg_megatron.weights.learnable import wanted


class MicroBatch(NamedTuple):
    """What an earlier stage knows of the tokens whose states it holds, all [B, S]."""

    labels: Tensor
    loss_mask: Tensor
    weights: Tensor  # of each token's language-model loss in what Megatron differentiates


class _Reader:
    """A data iterator that remembers what the script's own forward step took from it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._taken: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._taken.append(dict(batch) if isinstance(batch, dict) else batch)  # the script may cut its own in place
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def batch(self) -> dict[str, Any]:
        """The micro-batch of this forward step: what the script read, or the next one where it read nothing."""
        if not self._taken:
            next(self)
        if len(self._taken) > 1 or not isinstance(self._taken[0], dict):
            raise NotImplementedError(_OTHER_BATCHES)
        return self._taken[0]


_OTHER_BATCHES = (
    "on pipeline stages before the last, SimReg needs one dictionary per micro-batch with labels and loss_mask "
    "[micro-batch, sequence], and this script's data loader gives something else: name only layers of the last "
    "stage in --simreg-layers"
)


def with_terms(
    forward_step_func: Callable[..., Any], add_to: Callable[..., Tensor], config: Any, num_microbatches: int
) -> Callable[..., Any]:
    """The script's forward step on an earlier stage: what it returns carries the gradient of the stage's terms.

    Args:
        add_to: (output, model, MicroBatch) -> output.
        config: Megatron's, as its schedule scales the loss with it.
    """

    def forward_step(data_iterator: Any, model: Any, *more: Any) -> Any:
        reader = None if data_iterator is None else _Reader(data_iterator)
        output, loss_function = forward_step_func(reader, model, *more)
        part = compat.unwrapped(model)[0]
        labels, loss_mask = _labels(reader, part, output)
        weights = token_weights(loss_mask, config, num_microbatches, compat.context_group(part))
        return add_to(output, part, MicroBatch(labels, loss_mask, weights)), loss_function

    return forward_step


def _labels(reader: _Reader | None, model: Any, output: Any) -> tuple[Tensor, Tensor]:
    """Labels and loss mask [B, S] of the micro-batch that just ran: read on tensor rank 0, and broadcast."""
    tp, cp = compat.tensor_group(model), compat.context_group(model)
    if getattr(model, "mtp_process", False):  # what it sends on holds those states, too
        raise NotImplementedError(
            "--simreg-layers names a layer of a pipeline stage before the last that holds layers of multi-token "
            "prediction, too: name layers of other stages, or move those to the last one"
        )
    num_rows, num_sequences = output.shape[:2]
    shape = num_sequences, num_rows * (tp.size() if model.config.sequence_parallel else 1)
    if tp.rank() == 0:
        if reader is None:
            raise NotImplementedError(_no_data(model))
        batch = reader.batch()
        read = (batch.get(name) for name in ("labels", "loss_mask"))
        found = [tensor for tensor in read if tensor is not None and tensor.shape == (shape[0], shape[1] * cp.size())]
        if len(found) < 2:
            raise NotImplementedError(_OTHER_BATCHES)
        device = output.device
        # The loader's own memory may be pinned, and what is cut from it on the host is not.
        labels, loss_mask = (_of_context_rank(tensor.to(device, non_blocking=True), cp) for tensor in found)
        labels, loss_mask = labels.long().contiguous(), loss_mask.float().contiguous()
    else:
        labels = torch.empty(shape, dtype=torch.long, device=output.device)
        loss_mask = torch.empty(shape, dtype=torch.float32, device=output.device)
    if tp.size() > 1:
        for tensor in (labels, loss_mask):
            dist.broadcast(tensor, src=dist.get_global_rank(tp, 0), group=tp)
    return labels, loss_mask


def _no_data(model: Any) -> str:
    here = [layer.layer_number for layer in model.decoder.layers]
    return (
        f"--simreg-layers names a layer of the pipeline stage with layers {here[0]} to {here[-1]}, which has no data "
        "and so no labels: let the script build its training set there too (where its is_dataset_built_on_rank "
        "decides), or name layers of the last stage"
    )


def _of_context_rank(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, T] of whole sequences -> [B, S] of this context rank."""
    runs = ShardLayout(whole.shape[1], group.size()).held((group.rank(), 0))
    return torch.cat([whole[:, first:last] for first, last in runs], dim=1)


def token_weights(loss_mask: Tensor, config: Any, num_microbatches: int, context_group: dist.ProcessGroup) -> Tensor:
    """What Megatron multiplies the per-token loss [B, S] with before its backward, without a host sync."""
    weights = loss_mask
    if not config.calculate_per_token_loss:
        tokens = loss_mask.sum()
        if compat.adds_up_tokens_of_context_ranks():
            dist.all_reduce(tokens, group=context_group)
            weights = weights * context_group.size()
        weights = weights / tokens.to(torch.int).clamp(min=1) / num_microbatches
    if config.grad_scale_func is not None:
        weights = weights * config.grad_scale_func(torch.ones(1, device=loss_mask.device))
    return weights


class DataOfStages:
    """Lets earlier stages with named layers build the training set, through the script's own provider."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self._parts: list[Any] = []  # of the model on this rank, in the order in which Megatron builds their data

    def begin(self, models: list[Any]) -> None:
        self._parts = list(models)

    def build(self, build_iterators: Callable[..., Any], provider: Any, *args: Any, **kwargs: Any) -> Any:
        """`build_iterators(provider)` for the next part of the model."""
        if self._parts and inner.holds_earlier_layers(self.config, self._parts.pop(0)):
            provider = _training_set_too(provider)
        return build_iterators(provider, *args, **kwargs)


def _training_set_too(provider: Any) -> Any:
    def provide(*args: Any, **kwargs: Any) -> Any:
        with _built_on_this_stage() as added:
            train, *others = provider(*args, **kwargs)
        if added:  # nobody evaluates with what was built for the labels alone
            others = [[None] * len(data) if isinstance(data, list) else None for data in others]
        return (train, *others)

    provide.is_distributed = getattr(provider, "is_distributed", False)  # type: ignore[attr-defined]
    return provide


@contextmanager
def _built_on_this_stage() -> Iterator[list[Any]]:
    """Data sets are built on tensor rank 0 here, whatever the script says; holds the builders that would not have."""
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as Builder

    added: list[Any] = []
    initialize = Builder.__init__

    @functools.wraps(initialize)
    def also_here(builder: Any, *args: Any, **kwargs: Any) -> None:
        initialize(builder, *args, **kwargs)
        if not builder.is_built_on_rank() and parallel_state.get_tensor_model_parallel_rank() == 0:
            builder.is_built_on_rank = lambda: True
            added.append(builder)

    Builder.__init__ = also_here
    try:
        yield added
    finally:
        Builder.__init__ = initialize


def refuse(config: SimRegConfig, model: Any) -> None:
    """Raise for settings that need the last stage, where a part of the model before it holds named layers."""
    inner.refuse_decoder(config, model.decoder)
    number = inner.held_layers(config, model.decoder)[0]
    for part in config.parts:
        if wanted(part) or part.meets_heads:
            what = "trains scalars" if wanted(part) else "needs the output layer"
            raise NotImplementedError(
                f"--simreg-layers {number} lies on an earlier pipeline stage, and SimReg objective {part.objective} "
                f"{what}, which only the last stage has: name layers of the last stage, or choose other options"
            )


def announce(config: SimRegConfig, last_decoder: Any) -> None:
    """Say which layers lie elsewhere, on the rank of the log."""
    here = inner.held_layers(config, last_decoder)
    elsewhere = ",".join(str(number) for number in config.layer_numbers if number not in here)
    if elsewhere:
        log_once(f"SimReg: layers {elsewhere} lie on earlier pipeline stages, which read the labels themselves")
