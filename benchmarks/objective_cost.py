# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.objective_cost`: one call of each objective, and of what the log adds, beside plain Megatron's.

Plain is what follows the same states without any of it: the output layer and its cross-entropy. All take turns;
objectives and plain forward and backward. Each call is a line of benchmarks/results/objective_cost.csv; the table in
docs/objectives.md is made of that file (`--from FILE.csv`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import records
from benchmarks.measure import REPEATS, in_turns, seconds_in_turns
from benchmarks.records import RESULTS, ROOT, Record
from simreg_megatron.geometry import moments, pair_cosines
from simreg_megatron.losses import mic_loss, sigmoid_loss, sigreg_loss, simreg_loss
from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.losses.sigreg import random_directions
from simreg_megatron.magnitude import norm_table, radial_sums
from simreg_megatron.parallel.truncated_head import TruncatedHead, truncated_head_losses
from simreg_megatron.weights.heads import margins

SEQUENCES, LENGTH, WIDTH, LABELS = 2, 1024, 1024, 300
VOCABULARY, PREDICTED, PREFIXES = 32_000, 512, (128, 256)
PLAIN = f"plain: output layer and cross-entropy ({VOCABULARY} ids)"
SIMREG = "SimReg"


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
    rows = head.output_layer.weight.detach().requires_grad_()
    losses: dict[str, Callable[[], Tensor]] = {
        SIMREG: lambda: simreg_loss(states, labels),
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

    def plain() -> Any:
        logits = functional.linear(states, rows)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return torch.autograd.grad(loss, (states, rows))

    return (
        {PLAIN: plain}
        | {name: trained(loss) for name, loss in losses.items()}
        | {
            "log steps only: cosines of pairs": lambda: pair_cosines(fixed, labels),
            "log steps only: sums for isotropy": lambda: moments(fixed, valid),
            "log steps only: norms": lambda: [
                norm_table(fixed, counts) for counts in (valid, *pair_counts(labels, valid))
            ],
            "log steps only: radial gradient": lambda: radial_sums(fixed, fixed, valid),
            f"log steps only: right predictions ({PREDICTED} tokens, {VOCABULARY} ids)": lambda: margins(
                head, fixed.flatten(0, 1)[:PREDICTED], labels.flatten()[:PREDICTED], None
            ),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objective_cost", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--turns", type=int, default=REPEATS)
    records.add_options(parser, RESULTS / "objective_cost.csv")
    options = parser.parse_args()
    measured = None if options.source else _measured(options)
    records.finish(options.source or options.output, measured, table, page=ROOT / "docs" / "objectives.md")


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    calls = cases(options.device)
    in_turns(calls, options.device, 1)  # the first run of each also sets things up
    where = records.surroundings(threads=1, device=options.device)
    clock = time.process_time if options.device == "cpu" else time.perf_counter  # of one thread: other work is left out
    for name, times in seconds_in_turns(calls, options.device, options.turns, clock).items():
        for turn, seconds in enumerate(times):
            yield {"call": name, "turn": turn, "ms": f"{1000 * seconds:.3f}", **where}


def table(lines: list[Record]) -> Iterator[str]:
    times = {name: [float(line["ms"]) for line in lines if line["call"] == name] for name in _names(lines)}
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    turns = max(map(len, times.values()))
    yield f"{SEQUENCES} sequences of {LENGTH} tokens of width {WIDTH} in float32, whole sequences;"
    yield f"median of {turns} turn{'s' if turns > 1 else ''}. {records.described(lines)}."
    yield f"`python -m benchmarks.objective_cost --turns {turns}`"
    yield ""
    yield "| one call | ms | of plain | of SimReg |"
    yield "| --- | --- | --- | --- |"
    for name, ms in medians.items():
        yield f"| {name} | {ms:.0f} | {ms / medians[PLAIN]:.2g} | {ms / medians[SIMREG]:.2g} |"


def _names(lines: list[Record]) -> list[str]:
    return list(dict.fromkeys(line["call"] for line in lines))


if __name__ == "__main__":
    main()
