# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.versions.stages`: layers on earlier pipeline stages, under the schedules of every release.

megatron-core alone drives the tiny model of tiny.py, whole and cut into stages, with a term on layers 1, 2 and 4 and
on the final states, in both of Megatron's ways to normalise a loss. The parts together must have the gradient of the
whole; with the weights of the earlier stages doubled they must miss it.

`python -m tests.versions.stages CORE INPUT OUT LAYOUT ...` is one rank of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.versions.driver import LAMBDA, MODES, TEMPERATURE, use_only

LAYOUTS = {1: ("one process",), 2: ("PP 2", "PP 2 x VPP 2")}
VARIANTS = ("right", "doubled")
Grads = dict[str, Tensor]


def run_rank(core: Path, source: Path, out: Path, names: list[str]) -> None:
    use_only(core)
    from simreg_megatron.cpu import backend as cpu_backend

    cpu_backend.activate()
    from tests.versions import tiny

    given = torch.load(source, weights_only=True)
    for name in names:
        found = {
            f"{mode} {variant}": gradients(tiny.LAYOUTS[name], given, mode, variant)
            for mode in MODES
            for variant in VARIANTS
        }
        torch.save(found, out / f"{name} {os.environ['RANK']}.pt")


def gradients(layout: Any, given: dict[str, Any], mode: str, variant: str) -> Grads:
    """Of this rank's parameters, from one global batch."""
    from simreg_megatron import SimRegConfig, install, uninstall
    from simreg_megatron.plugin import layers
    from tests.versions import tiny

    tiny.start(layout)
    chunks = tiny.build(layout, given["vocabulary"], per_token=mode == "per-token")
    tiny.load(chunks, given["weights"])
    weights = layers.token_weights
    layers.token_weights = lambda *tokens: weights(*tokens) * (2 if variant == "doubled" else 1)
    felt = {"lambda_": LAMBDA, "temperature": TEMPERATURE, "chunk_size": given["chunk"]}
    install(config=SimRegConfig(layers="1,2,4,final", **felt))
    try:
        run_schedule(chunks, given["tokens"], given["mask"])
    finally:
        uninstall()
        layers.token_weights = weights
    return tiny.gradients(chunks)


def run_schedule(chunks: list[Any], tokens: Tensor, mask: Tensor) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.versions import tiny

    def batches() -> Iterator[dict[str, Tensor]]:
        for given, counted in zip(tokens, mask, strict=True):
            yield {"tokens": given[:, :-1].contiguous(), "labels": given[:, 1:].contiguous(), "loss_mask": counted}

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        return tiny.forward(model, *batch.values(), name="loss")

    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in chunks],
        model=chunks,
        num_microbatches=len(tokens),
        seq_length=tiny.LENGTH,
        micro_batch_size=tiny.MICRO_BATCH,
        forward_only=False,
    )


def report(bench: Any, version: str) -> tuple[str, bool]:
    """One line, and whether all is as it must be."""
    from tests.versions.compare import TOLERANCE, RunError

    out = bench.cache / "out" / f"{version} stages"
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Grads]] = {}
    try:
        for count, names in LAYOUTS.items():
            words = ["-m", "tests.versions.stages", str(bench.core(version)), str(bench.given), str(out), *names]
            bench.run(f"{version} stages {count}", words, count=count)
            for name in names:
                ranks = [torch.load(out / f"{name} {rank}.pt", weights_only=True) for rank in range(count)]
                found[name] = {run: {k: v for rank in ranks for k, v in rank[run].items()} for run in ranks[0]}
    except RunError as error:
        return f"{version}: {error}", False
    whole, words, holds = found.pop("one process"), [], True
    for name, parts in found.items():
        for mode in MODES:
            expected = whole[f"{mode} right"]
            right, doubled = (apart(expected, parts[f"{mode} {variant}"]) for variant in VARIANTS)
            holds &= right <= TOLERANCE < 1e-2 < doubled
            words.append(f"{name}, {mode}: {right:.0e} (doubled {doubled:.0e})")
    return f"{version}: " + "; ".join(words), holds


def apart(expected: Grads, found: Grads) -> float:
    """The largest over parameters, relative."""
    assert expected.keys() == found.keys()
    return max(((grad - found[name]).norm() / grad.norm()).item() for name, grad in expected.items())


def main() -> int:
    if len(sys.argv) > 3 and not sys.argv[1].startswith("-"):
        core, source, out, *names = sys.argv[1:]
        run_rank(Path(core), Path(source), Path(out), names)
        return 0
    from tests.versions import measure, releases
    from tests.versions.processes import ROOT

    parser = argparse.ArgumentParser(prog="python -m tests.versions.stages", description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".versions", metavar="DIR", help="installed releases")
    parser.add_argument("--only", default="", metavar="TEXT", help="releases that begin so")
    args = parser.parse_args()
    bench, all_hold = measure.Bench(args.cache, None), True
    for version in releases.VERSIONS:
        if version.startswith(args.only):
            line, holds = report(bench, version)
            all_hold &= holds
            print(f"{'equal ' if holds else 'NOT SO'} {line}", flush=True)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
