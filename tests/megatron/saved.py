# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints, trained and saved by Megatron's own loop, and the same weights saved again in other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.megatron import forks, runs
from tests.megatron.runs import Recorded

# Wide initial weights: attention and experts then matter for the logits after two steps already.
_TRAINING = ("--init-method-std", "0.15", "--train-iters", "2", "--eval-iters", "0")
_STANDING_STILL = ("--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--finetune", "--train-iters", "1")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "vpp2": ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
    "ep2": ("--expert-model-parallel-size", "2"),
    "tp2-sp": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
}
LAYOUTS["tp2-ep2-whole"] = (*LAYOUTS["tp2-sp"], *LAYOUTS["ep2"], "--expert-tensor-parallel-size", "1")
# Experts are split over tensor ranks too; gloo cannot gather the unequal numbers of tokens of the other dispatcher.
LAYOUTS["tp2-ep2"] = (*LAYOUTS["tp2-sp"], *LAYOUTS["ep2"], "--moe-token-dispatcher-type", "allgather")


@dataclass
class Saved:
    """A model's checkpoints in several layouts; each is made when it is first asked for.

    Attributes:
        folder: where they go.
        data_flags: Megatron's flags for the text.
        model: a name of `runs.MODELS`.
        more: flags for all runs, such as --bf16.
    """

    folder: Path
    data_flags: tuple[str, ...]
    model: str
    more: tuple[str, ...] = ()
    recorded: dict[str, Recorded] = field(default_factory=dict)

    def trained(self) -> Path:
        """Two steps on one rank: the weights that all others hold again."""
        return self._run("trained", _TRAINING)

    def trained_in(self, layout: str, ckpt_format: str) -> Path:
        """Two steps in another layout: other weights, by rounding."""
        name = f"trained-{layout}-{ckpt_format}"
        return self._run(name, (*_TRAINING, *LAYOUTS[layout], "--ckpt-format", ckpt_format), layout)

    def again(self, layout: str, *, load: Path | None = None) -> Path:
        """The same weights, loaded by Megatron in another layout and saved after a step that moves nothing."""
        source = load or self.trained()
        flags = (*_STANDING_STILL, "--load", str(source), *LAYOUTS[layout], "--eval-iters", "0")
        return self._run(f"{layout}-{source.name}", flags, layout)

    def _run(self, name: str, flags: Sequence[str], layout: str = "one") -> Path:
        out = self.folder / self.model / name
        if name not in self.recorded:
            place = ("--save", str(out / "saved"), "--save-interval", "2")
            processes = {"one": 1, "tp2-ep2": 4}.get(layout, 2)
            options = {"model": self.model, "processes": processes, "plain": True}
            self.recorded[name] = runs.train(out, (*self.data_flags, *self.more, *flags, *place), **options)
        return out / "saved"


def logits_of(load: Path, tokens: Tensor, scratch: Path) -> Tensor:
    """Logits of Megatron's own model, on a forked rank that has Megatron in memory already."""
    given, found = scratch / "tokens.pt", scratch / "logits.pt"
    torch.save(tokens, given)
    log = scratch / "log"
    if forks.run_ranks(_write_logits, load, given, found, processes=1, log=log, timeout=120):
        raise runs.RunError(log.read_text()[-4000:])
    return torch.load(found, weights_only=True)


def _write_logits(load: Path, given: Path, found: Path) -> None:
    from simreg_megatron.tools.folders import checkpoint_folder
    from tests.helpers.megatron_logits import megatron_logits

    tokens = torch.load(given, weights_only=True)
    torch.save(megatron_logits(checkpoint_folder(load), tokens), found)
