# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.objective_cost`: one call of each objective, and of what the log adds, beside SimReg's.

All take turns on the same states; objectives forward and backward. The rows of docs/objectives.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import REPEATS, in_turns
from simreg_megatron.geometry import moments, pair_cosines
from simreg_megatron.losses import mic_loss, sigmoid_loss, sigreg_loss, simreg_loss
from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.losses.sigreg import random_directions
from simreg_megatron.magnitude import norm_sums, radial_sums
from simreg_megatron.parallel.truncated_head import TruncatedHead, truncated_head_losses
from simreg_megatron.plugin.heads import predicts_label

SEQUENCES, LENGTH, WIDTH, LABELS = 2, 1024, 1024, 300
VOCABULARY, PREDICTED, PREFIXES = 32_000, 512, (128, 256)


def cases(device: str) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=generator).to(device).requires_grad_()
    labels = torch.randint(0, LABELS, (SEQUENCES, LENGTH), generator=generator).to(device)
    head = SimpleNamespace(output_layer=SimpleNamespace(weight=torch.randn(VOCABULARY, WIDTH, device=device)))
    rows, places = torch.randn(VOCABULARY, WIDTH, device=device, requires_grad=True), labels.flatten()
    truncated = TruncatedHead(rows, PREFIXES)
    valid, fixed = torch.ones_like(labels, dtype=torch.bool), states.detach()

    def directions(number: int) -> Tensor:
        return random_directions(number, WIDTH, seed=0, iteration=0, device=states.device)

    few, many = directions(16), directions(256)
    losses: dict[str, Callable[[], Tensor]] = {
        "SimReg": lambda: simreg_loss(states, labels),
        "SIGReg, mean (16 directions)": lambda: sigreg_loss(states, labels, directions=few),
        "SIGReg, Epps-Pulley (256 directions)": lambda: sigreg_loss(
            states, labels, directions=many, estimator="epps-pulley"
        ),
        "sigmoid, balanced": lambda: sigmoid_loss(states, labels, pair_reduction="balanced"),
        "MIC (chunks of 128, prefixes 16 to 512)": lambda: mic_loss(states, labels, chunk_size=128),
        f"prefixes-ce ({' and '.join(map(str, PREFIXES))} features, {VOCABULARY} ids)": lambda: truncated_head_losses(
            states.flatten(0, 1)[:, : PREFIXES[-1]], places, places >= 0, truncated
        ).mean(),
    }

    def trained(loss: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(), (states, rows), allow_unused=True)

    return {name: trained(loss) for name, loss in losses.items()} | {
        "log steps only: cosines of pairs": lambda: pair_cosines(fixed, labels),
        "log steps only: sums for isotropy": lambda: moments(fixed, valid),
        "log steps only: norms": lambda: [norm_sums(fixed, counts) for counts in (valid, *pair_counts(labels, valid))],
        "log steps only: radial gradient": lambda: radial_sums(fixed, fixed, valid),
        f"log steps only: right predictions ({PREDICTED} tokens, {VOCABULARY} ids)": lambda: predicts_label(
            head, fixed.flatten(0, 1)[:PREDICTED], labels.flatten()[:PREDICTED], None
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objective_cost", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--turns", type=int, default=REPEATS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = cases(options.device)
    in_turns(calls, options.device, 1)  # the first run of each also sets things up
    medians = in_turns(calls, options.device, options.turns)
    rows = ["| | ms | of SimReg |", "|---|---|---|"]
    rows += [f"| {name} | {1000 * time:.0f} | {time / medians['SimReg']:.2g} |" for name, time in medians.items()]
    print("\n".join(rows))


if __name__ == "__main__":
    main()
