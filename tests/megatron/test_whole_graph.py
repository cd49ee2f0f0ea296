# SPDX-License-Identifier: Apache-2.0
"""Full-iteration CUDA graphs, in Megatron's own loop and wrapper on an emulated graph (emulated_graph.py): six steps,
the second of which is captured and the last four are replays, come to the bits of six steps without a graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from simreg_megatron import objectives
from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.parity.cells import neighbour
from tests.megatron.runs import SIMREG

EAGER = ("--train-iters", "6", "--eval-iters", "0", "--no-check-for-nan-in-loss-and-grad")
GRAPH = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1")

EACH = {one.name: one.felt for one in objectives.BUILT_IN.values() if one.trains and not one.draws}
SETTINGS = {
    "plain": (),
    "ramp": (*SIMREG, "--simreg-warmup-iters", "4"),
    "off in the end": (*SIMREG, "--simreg-off-after", "0.5"),
    "document mask": (*SIMREG, "--simreg-document-mask", "--simreg-chunk-size", "16"),
    "TP2 with SP": (*SIMREG, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "AdaGC": (*SIMREG, "--adagc"),
    **{name: neighbour(name, f"{felt.weight:g}", felt.chunk_size, felt.options).flags for name, felt in EACH.items()},
}


QUICK = ("ramp", "TP2 with SP", "AdaGC")


@pytest.mark.parametrize("name", quick(SETTINGS, lambda name: name in QUICK))
def test_replays_compute_the_same(name: str, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *EAGER, *SETTINGS[name])
    processes = 2 if name.startswith("TP2") else 1
    eager = runs.train(tmp_path / "eager", flags, processes=processes)
    graph = runs.train(tmp_path / "graph", (*flags, *GRAPH), processes=processes, patch="emulated_graph:activate")
    assert eager.losses == graph.losses and eager.norms == graph.norms and runs.same_bits(eager, graph)
    log = (tmp_path / "graph" / "log").read_text()
    assert "replay 4" in log and "replay 5" not in log
    kept = [{name: line[name] for name in found} for line, found in zip(eager.logged, graph.logged, strict=True)]
    assert kept == graph.logged
    if name != "plain":
        assert len(graph.logged) == 6 and "no geometry is measured" in log
        assert not any("cosine" in value for line in graph.logged for value in line)


@pytest.mark.parametrize("patch", ["frozen_lambda", "waits"])
def test_what_a_graph_cannot_repeat_is_seen(patch: str, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *EAGER, *SETTINGS["ramp"])
    done = runs.attempt(tmp_path / "graph", (*flags, *GRAPH), patch=f"emulated_graph:{patch}")
    if patch == "waits":
        assert done.status != 0 and "while a graph was captured" in done.output
    else:
        eager, graph = runs.train(tmp_path / "eager", flags), runs.read(tmp_path / "graph")
        assert eager.losses[:3] == graph.losses[:3], "its own value, until the first replay"
        assert eager.losses[3] != graph.losses[3] and not runs.same_bits(eager, graph)
