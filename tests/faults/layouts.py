# SPDX-License-Identifier: Apache-2.0
"""The runs that are struck: six layouts of a tiny model, each with states of ours that a resume must bring back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STEPS = 10
SAVE_INTERVAL = 3
"""Saves after steps 3, 6 and 9, and after the last one: the last step is never the first after a save."""

_LENGTH = ("--train-iters", str(STEPS), "--save-interval", str(SAVE_INTERVAL), "--lr-warmup-iters", "2")
_MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128", "--seq-length", "64"),
    *("--global-batch-size", "4", "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "1000"),
    *("--simreg-lambda", "1", "--simreg-chunk-size", "24"),
)
# A minute is the shortest timeout for a hanging rank that Megatron accepts.
_PATIENCE = ("--distributed-timeout-minutes", "1")
_ADAGC = ("--adagc", "--adagc-lambda-rel", "0.95", "--adagc-beta", "0.8", "--adagc-warmup-iters", "2")
_RAMP = ("--simreg-warmup-iters", "7", "--simreg-lambda-schedule", "cosine:0.1")
_EXPONENTS = ("--simreg-similarity", "learnable")
_SIGMOID = ("--simreg-objective", "sigmoid")
_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
_EXPERTS_ALIKE = ("--moe-router-load-balancing-type", "none")  # that loss would depend on the layout


@dataclass(frozen=True)
class Layout:
    name: str
    processes: int
    split: tuple[str, ...]  # flags that spread the model
    states: tuple[str, ...]  # flags of what it carries besides weights and Adam's averages, in every layout
    family: str = "llama"
    goes_on_in: tuple[str, ...] = ()  # layouts in which it may go on, to the same numbers but for rounding

    def torchrun_words(self, text: Path, output: Path, among: Layout | None = None) -> list[str]:
        """The script and its arguments; `among` is the layout that the run goes on in."""
        data = ["--data", str(text / "train"), "--valid-data", str(text / "valid")]
        data += ["--tokenizer", str(text / "tokenizer.model"), "--data-cache-path", str(output / "cache")]
        flags = [*_LENGTH, *_MODEL, *_PATIENCE, *self.states, *(among or self).split]
        return [f"launch/pretrain_{self.family}.sh", *data, *flags, "--output", str(output), "--auto-resume"]


_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_EP2 = ("--expert-model-parallel-size", "2")
_ALL = (
    Layout("one", 1, (), (*_ADAGC, *_RAMP, *_DROPOUT)),
    Layout("tp2-sp", 2, _TP2, (*_ADAGC, *_EXPONENTS), goes_on_in=("one", "pp2", "cp2")),
    Layout("pp2", 2, ("--pipeline-model-parallel-size", "2"), (*_SIGMOID, *_RAMP), goes_on_in=("one", "tp2-sp")),
    Layout("cp2", 2, ("--context-parallel-size", "2"), (*_EXPONENTS, *_RAMP), goes_on_in=("one", "tp2-sp", "pp2")),
    Layout("dp2", 2, (), ("--use-distributed-optimizer", "--bf16", *_ADAGC, *_RAMP, *_DROPOUT)),
    # Megatron's optimizer cannot be loaded into another number of expert-parallel ranks.
    Layout("ep2", 2, _EP2, (*_EXPERTS_ALIKE, *_SIGMOID, *_ADAGC), family="mixtral", goes_on_in=("pp2-ep2",)),
)
LAYOUTS = {layout.name: layout for layout in _ALL}
_STAGES_OF_EXPERTS = ("--pipeline-model-parallel-size", "2", *_EP2)
TARGETS = {**LAYOUTS, "pp2-ep2": Layout("pp2-ep2", 4, _STAGES_OF_EXPERTS, (), family="mixtral")}
"""Where a run may go on: nothing strikes it there."""
