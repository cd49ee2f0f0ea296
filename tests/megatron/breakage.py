# SPDX-License-Identifier: Apache-2.0
"""Things to break on purpose inside a run, each a function to call before it starts.

Megatron's loss with SimReg minus the same loss without it has value zero and SimReg's gradient alone.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Keywords = dict[str, Any]


def doubled_scale() -> None:
    """Twice SimReg's gradient, as a forgotten division by two ranks would give."""
    from simreg_megatron.plugin import term

    add_gradient = term.add_gradient
    term.add_gradient = lambda loss, terms, *args, **kwargs: add_gradient(loss, 2 * terms, *args, **kwargs)


def shifted_labels() -> None:
    """SimReg groups each hidden state by its neighbour's target."""
    _change_simreg(lambda given: {**given, "labels": given["labels"].roll(1, dims=1)})


def masked_tokens_kept() -> None:
    """SimReg compares with tokens that the loss mask leaves out."""
    _change_simreg(lambda given: {**given, "loss_mask": torch.ones_like(given["loss_mask"])})


def flattened_batch() -> None:
    """SimReg takes the sequences of a micro-batch for one long sequence."""

    def flattened(given: Keywords) -> Keywords:
        rows = {name: given[name].reshape(1, -1) for name in ("labels", "loss_mask")}
        hidden = given["hidden_states"]
        return {**given, **rows, "hidden_states": hidden.transpose(0, 1).reshape(-1, 1, hidden.shape[-1])}

    _change_simreg(flattened)


def samples_cut_as_one() -> None:
    """SimReg takes the samples of a packed row to be cut over context ranks as a whole."""
    from simreg_megatron.plugin import tokens
    from tests.megatron.oracles import padded_samples

    padded_samples()
    tokens.dataclasses = mock.Mock(replace=lambda instance, **_: instance)


def _change_simreg(change: Callable[[Keywords], Keywords]) -> None:
    """SimReg sees the changed arguments, the language-model loss the right ones."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    with_simreg = GPTModel._postprocess
    without = with_simreg.__wrapped__  # what install() wrapped

    def changed(model: Any, **given: Any) -> Tensor:
        loss = without(model, **given)
        if given["labels"] is None:  # a pipeline stage before the last
            return loss
        wrong = change(given)
        return loss + (with_simreg(model, **wrong) - without(model, **wrong)).view_as(loss)

    GPTModel._postprocess = changed


def other_ranks_dropped() -> None:
    """Backwards, what the tokens of other ranks do to those of this rank is lost."""
    from simreg_megatron.parallel.shard import Located, SequenceShard

    whole = SequenceShard.gather_all

    def own_pull_alone(self: Any, per_row: Tensor) -> Located:
        found = whole(self, per_row)
        if not per_row.is_floating_point():
            return found
        owners = whole(self, torch.full_like(per_row, self.row_group.rank())).values
        return Located(torch.where(owners == self.row_group.rank(), found.values, 0.0), found.runs)

    SequenceShard.gather_all = own_pull_alone


def shared_work_not_summed() -> None:
    """Tensor-parallel ranks that share the anchors keep each its own part of the gradient."""
    from simreg_megatron.parallel import shard

    with_others = shard.SequenceShard.from_all_anchors

    def own_alone(self: Any, of_anchors: Tensor) -> Tensor:
        with mock.patch.object(shard.dist, "all_reduce"):
            return with_others(self, of_anchors)

    shard.SequenceShard.from_all_anchors = own_alone


def local_means_logged() -> None:
    """The log shows the mean of the ranks' own means."""
    from simreg_megatron.parallel import metrics

    reduce = metrics.Metrics.reduce

    def averaged(self: Any, group: Any, *others: Any, **options: Any) -> dict[str, Tensor]:
        with mock.patch.object(metrics.dist, "all_reduce"):
            means = reduce(self, group, *others, **options)
        for mean in means.values():
            torch.distributed.all_reduce(mean.div_(group.size()), group=group)
        return means

    metrics.Metrics.reduce = averaged


def vocabulary_not_gathered() -> None:
    """A truncated output layer is normalized over each rank's own part of the vocabulary."""
    from simreg_megatron.contrib import prefixes_ce

    losses = prefixes_ce.truncated_head_losses
    prefixes_ce.truncated_head_losses = lambda rows, local, here, head: losses(
        rows, local, here, head._replace(tensor_group=None)
    )


def halved_weight_gradient() -> None:
    """Half the gradient that the truncated output layer's weight gets."""
    from simreg_megatron.contrib import prefixes_ce

    whole = prefixes_ce._gradient_for_autograd
    prefixes_ce._gradient_for_autograd = lambda grad, *args, **kwargs: whole(grad / 2, *args, **kwargs)


def other_anchors_dropped() -> None:
    """Each tensor-parallel rank takes its own anchors alone backwards through its part of the vocabulary."""
    from simreg_megatron.contrib import prefixes_ce

    share = prefixes_ce.share_work
    prefixes_ce.share_work = lambda values, group: values if values.dim() == 2 else share(values, group)


def overwritten_wrapper() -> None:
    """Someone put the function back that the plugin had wrapped: SimReg is on, and never reached."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    GPTModel._postprocess = GPTModel._postprocess.__wrapped__


def other_model_class() -> None:
    """A model that never passes through the wrapped function."""
    from simreg_megatron.plugin import refusals

    class OtherModel(torch.nn.Module):
        post_process = True

    refuse = refusals.refuse_models
    refusals.refuse_models = lambda config, chunks, known: refuse(config, [OtherModel()], known)


def adagc_local_norms() -> None:
    """Norms of a rank's own shards in the place of whole parameters."""
    from simreg_megatron.adagc import clipping
    from tests.megatron import watch

    clip = clipping.Clipping.clip

    def without_exchange(self: Any) -> Any:
        with mock.patch.object(clipping.dist, "all_reduce"):
            return clip(self)

    clipping.Clipping.clip = without_exchange
    watch.adagc()


def adagc_replicas_counted_twice() -> None:
    """Count parameters replicated over tensor ranks once per rank, with the check at the start disabled."""
    from simreg_megatron.adagc import clipping

    adagc_replicas_counted_twice_and_checked()
    clipping.refuse_miscounted = lambda *args: None


def adagc_replicas_counted_twice_and_checked() -> None:
    from simreg_megatron.adagc import gradients
    from tests.megatron import watch

    watch.adagc()
    found = gradients._tensor_rank_and_size
    gradients._tensor_rank_and_size = lambda parameter: (0, found(parameter)[1])


def adagc_instances_counted_twice() -> None:
    """Count parameters held by every instance of the distributed optimizer once per instance."""
    from simreg_megatron.adagc import clipping, gradients
    from tests.megatron import watch

    watch.adagc()
    listed = gradients.main_parameters
    gradients.main_parameters = lambda *single: (main._replace(is_counted=True) for main in listed(*single))
    clipping.refuse_miscounted = lambda *args: None


def gradient_of_mtp_not_finite_in_third_step() -> None:
    """The gradient of a further prediction's parameter, which Megatron leaves out of its main norm, is infinite."""
    from megatron.core.optimizer import ChainedOptimizer

    from tests.megatron import watch

    watch.adagc()
    prepare_grads, calls = ChainedOptimizer.prepare_grads, []

    def broken(optimizer: Any) -> Any:
        result = prepare_grads(optimizer)
        calls.append(None)
        if len(calls) == 3:
            chosen = next(p for p in optimizer.get_parameters() if getattr(p, "grad_norm_group", None))
            chosen.grad.view(-1)[0] = float("inf")
        return result

    ChainedOptimizer.prepare_grads = broken
