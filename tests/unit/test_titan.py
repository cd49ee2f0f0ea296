# SPDX-License-Identifier: Apache-2.0
"""SimReg in torchtitan: the loss alone, and torchtitan's own trainer with it, on a CPU in one process."""

import os
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from simreg_megatron.losses import simreg_loss
from tests.helpers import jobs
from tests.megatron.runs import ROOT

titan = pytest.importorskip("torchtitan", reason="torchtitan is not installed")
WIDTH, TOKENS, LABELS = 16, 96, 7


def rows() -> tuple[int, ...]:
    """Return the shape of a micro-batch's labels: two rows in release 0.3, tokens alone in newer commits."""
    from torchtitan.config import TrainingConfig

    return (2, TOKENS) if hasattr(TrainingConfig, "seq_len") else (TOKENS,)


def a_loss(**options: Any) -> Any:
    from torchtitan.distributed import utils

    from simreg_megatron.loop.titan import SimRegLoss

    utils.set_spmd_backend("spmd_types")
    torch.manual_seed(0)
    loss = SimRegLoss.Config(simreg_chunk_size=32, simreg_temperature=0.5, num_chunks=4, **options).build()
    loss.set_lm_head(torch.nn.Linear(WIDTH, LABELS, bias=False))
    return loss


@pytest.mark.parametrize("masks_documents", [False, True])
def test_the_gradient_is_cross_entropys_and_simregs(masks_documents: bool) -> None:
    loss = a_loss(simreg_lambda=3.0, simreg_document_mask=masks_documents)
    hidden_states = torch.randn(*rows(), WIDTH, requires_grad=True)
    labels = torch.randint(0, LABELS, rows())
    labels[..., 5:9] = -100
    positions = torch.cat([torch.arange(40), torch.arange(TOKENS - 40)]).expand(rows())
    valid, documents = labels != -100, torch.tensor([0] * 40 + [1] * (TOKENS - 40)).expand(rows())
    value, metrics = loss(hidden_states, labels, valid.sum(), positions=positions)
    value.backward()

    expected = hidden_states.detach().clone().requires_grad_()
    weight = loss.lm_head.weight.detach()

    def cross_entropy_of(states: torch.Tensor) -> torch.Tensor:
        logits = (states @ weight.T).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / valid.sum()

    cross_entropy = cross_entropy_of(expected)
    options: dict[str, Any] = {"documents": documents.view(-1, TOKENS)} if masks_documents else {}
    term = simreg_loss(
        expected.view(-1, TOKENS, WIDTH), labels.view(-1, TOKENS), valid=valid.view(-1, TOKENS), chunk_size=32,
        temperature=0.5, reduction="sum", impl="reference", **options,
    ) / valid.sum()  # fmt: skip
    (cross_entropy + 3 * term).backward()
    assert value.item() == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert metrics["simreg/mean"].item() == pytest.approx(term.item(), rel=1e-5)
    torch.testing.assert_close(hidden_states.grad, expected.grad, rtol=1e-4, atol=1e-7)
    (without,) = torch.autograd.grad(cross_entropy_of(expected), expected)
    assert (hidden_states.grad - without).norm() > 0.1 * without.norm()


def test_what_it_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from simreg_megatron.loop import titan

    states, labels = torch.randn(*rows(), WIDTH, requires_grad=True), torch.zeros(rows(), dtype=torch.long)
    with pytest.raises(ValueError, match="simreg_document_mask needs positions"):
        a_loss(simreg_document_mask=True)(states, labels)
    with pytest.raises(ValueError, match="simreg_chunk_size 32 must be at least 2 and divide the 80 tokens"):
        a_loss()(states[..., :80, :], labels[..., :80])
    with pytest.raises(ValueError, match="simreg_lambda must be 0 or more, not -1"):
        a_loss(simreg_lambda=-1)
    monkeypatch.setattr(titan, "spmd_mesh_size", lambda axis: 2 if axis == "cp" else 1)
    with pytest.raises(NotImplementedError, match="without tensor or context parallelism"):
        a_loss()(states, labels)
    assert a_loss(simreg_lambda=0.0)(states, labels)[1] == {}


def trained(weight: str, kind: str, folder: Path) -> list[tuple[str, str]]:
    """Loss and gradient norm of each step that torchtitan logs on the last rank."""
    tokenizer = Path(titan.__path__[0]).parent / "tests" / "assets" / "tokenizer"
    if not tokenizer.is_dir():
        pytest.skip("torchtitan's debug model takes the tokenizer of its source tree")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ranks = "1" if kind == "one" else "2"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}", "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> str:
        words = [weight, port, str(tokenizer), str(rank), ranks, kind]
        command = [sys.executable, "-m", "tests.helpers.titan_on_cpu", *words]
        done = jobs.run(command, cwd=folder, env=environment, merged=True)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    said = list(ThreadPoolExecutor(2).map(run, range(int(ranks))))[-1]
    return re.findall(r"step: +\d+ .*?loss: +(\S+) .*?grad_norm: +(\S+)", said)


@pytest.mark.slow
def test_torchtitans_trainer_trains_with_it_in_every_layout(tmp_path: Path) -> None:
    off, on = (trained(weight, "one", tmp_path) for weight in ("0", "10"))
    assert len(off) == len(on) == 4
    assert off[0][0] == on[0][0], "the logged loss is the cross-entropy alone"
    assert off[0][1] != on[0][1] and off[3][0] != on[3][0], "its gradient is not"
    for kind in ("fsdp", "replicate", "pipeline"):
        found = trained("10", kind, tmp_path)
        numbers = [[float(number) for step in steps for number in step] for steps in (found, on)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4), kind
