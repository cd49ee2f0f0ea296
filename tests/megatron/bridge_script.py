# SPDX-License-Identifier: Apache-2.0
"""A training loop that speaks Megatron-Bridge's callback protocol of release 0.6.2, around Megatron's own model.

Bridge itself does not import without Transformer Engine.
"""

import contextlib
import io
from types import SimpleNamespace

import pytest
import torch

from simreg_megatron import SimRegConfig, install, uninstall
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.loop.bridge import SimRegCallback
from tests.megatron.own_script import build_model, gradients, sample, start

EVENTS = ("on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end")
LAMBDA, WARMUP = 2.0, 4


class Scalars(dict):
    def add_scalar(self, name: str, value: torch.Tensor, step: int) -> None:
        self[name, step] = float(value)


def registered(callback: object) -> dict[str, list]:
    """As Bridge's CallbackManager.add: bound methods that its base class does not have."""
    found = {name: getattr(callback, name, None) for name in EVENTS}
    return {name: [method] if hasattr(method, "__func__") else [] for name, method in found.items()}


def train(model, tokens, labels, steps: int, log_interval: int) -> tuple[list[dict], Scalars, str]:
    events, scalars, said = registered(SimRegCallback()), Scalars(), io.StringIO()
    state = SimpleNamespace(
        train_state=SimpleNamespace(step=0),
        cfg=SimpleNamespace(
            logger=SimpleNamespace(log_interval=log_interval), train=SimpleNamespace(train_iters=steps)
        ),
        tensorboard_logger=scalars,
        wandb_logger=None,
    )
    context = SimpleNamespace(state=state, model=[model])
    found = []
    with contextlib.redirect_stdout(said):
        _fire(events, "on_train_start", context)
        for _ in range(steps):
            _fire(events, "on_train_step_start", context)
            found.append(gradients(model, tokens, labels)[1])
            _fire(events, "on_train_step_end", context)
            state.train_state.step += 1
    return found, scalars, said.getvalue()


def _fire(events: dict[str, list], name: str, context: SimpleNamespace) -> None:
    for method in events[name]:
        method(context)


def main() -> None:
    cpu_backend.activate()
    start()
    model = build_model()
    tokens, labels = sample()
    _, plain = gradients(model, tokens, labels)
    with pytest.raises(RuntimeError, match=r"call install\(config="):
        train(model, tokens, labels, 1, 1)

    install(config=SimRegConfig(lambda_=LAMBDA, temperature=0.5, chunk_size=12, warmup_iters=WARMUP))
    with pytest.raises(RuntimeError, match="needs Megatron's training loop, or one that"):
        gradients(model, tokens, labels)
    steps, scalars, said = train(model, tokens, labels, WARMUP + 1, 2)
    for name, full in steps[-1].items():
        for step, got in enumerate(steps):
            share = min(1.0, (step + 1) / WARMUP)
            torch.testing.assert_close(got[name] - plain[name], share * (full - plain[name]), rtol=2e-4, atol=2e-7)
    change = sum((steps[-1][name] - plain[name]).norm() ** 2 for name in plain) ** 0.5
    assert change > 0.1 * sum(value.norm() ** 2 for value in plain.values()) ** 0.5, "SimReg must matter"
    assert {step for name, step in scalars if name == "simreg loss"} == {2, 4}
    assert all(scalars["simreg positive cosine", step] != 0 for step in (2, 4))
    assert said.count("simreg loss:") == 2 and "lambda 2" in said, said
    uninstall()
    install(config=SimRegConfig(objective="simreg:1.5,sigreg:0.25", chunk_size=12))
    _, scalars, said = train(model, tokens, labels, 1, 1)
    assert "SimReg: lambda 1.5" in said and "objective sigreg: lambda 0.25" in said, said
    assert {"simreg loss", "sigreg loss"} <= {name for name, _ in scalars}
    uninstall()
    print("bridge script: all as expected")
