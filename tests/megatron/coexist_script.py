# SPDX-License-Identifier: Apache-2.0
"""The plugin with other wrappers of the same function, in either order, and with subclasses."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from simreg_megatron import install, uninstall
from simreg_megatron.cpu import backend as cpu_backend
from tests.megatron.own_script import CONFIG, LENGTH, build_model, causal_mask, gradients

Gradients = dict[str, torch.Tensor]


def doubling(postprocess: Any) -> Any:
    """Someone else's wrapper: twice the language-model loss."""

    def doubled(model: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * postprocess(model, *args, **kwargs)

    return doubled


def added(plain: Gradients, with_simreg: Gradients) -> Gradients:
    return {name: with_simreg[name] - plain[name] for name in plain}


def assert_close(got: Gradients, wanted: Gradients, factor: float) -> None:
    for name in wanted:
        torch.testing.assert_close(got[name], factor * wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def main() -> None:
    cpu_backend.activate()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    os.environ.setdefault("MASTER_PORT", "29514")
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model = build_model()
    tokens = torch.randint(0, 8, (2, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    data = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    original = GPTModel._postprocess

    _, plain = gradients(model, *data)
    install(config=CONFIG)
    ours = added(plain, gradients(model, *data)[1])
    uninstall()

    # Theirs first, ours around it: the doubled loss gains one term.
    theirs = GPTModel._postprocess = doubling(original)
    _, doubled = gradients(model, *data)
    install(config=CONFIG)
    assert_close(added(doubled, gradients(model, *data)[1]), ours, 1)
    uninstall()
    assert GPTModel._postprocess is theirs, "theirs stays"
    GPTModel._postprocess = original

    # Ours first, theirs around it: what they do to the loss, they do to its term.
    install(config=CONFIG)
    wrapped = GPTModel._postprocess
    GPTModel._postprocess = doubling(wrapped)
    assert_close(added(doubled, gradients(model, *data)[1]), ours, 2)
    try:
        uninstall()
    except RuntimeError as error:
        assert "wrapped again after SimReg: undo that first" in str(error)
    else:
        raise AssertionError("their wrapper must not be cut off")
    GPTModel._postprocess = wrapped
    uninstall()
    assert GPTModel._postprocess is original

    # A class that overrides both functions, of a model that was built before install(): its first step is refused.
    class Deaf(GPTModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._postprocess()

        def _postprocess(self) -> Any:
            return torch.zeros(())

    model.__class__ = Deaf
    install(config=CONFIG)
    try:
        model()
    except NotImplementedError as error:
        assert "Deaf overrides _postprocess" in str(error)
    else:
        raise AssertionError("a model that hides both functions must not train past SimReg")
    uninstall()
    model()  # and is left alone afterwards
    model.__class__ = GPTModel

    # A subclass that overrides the function and calls super().
    class Mine(GPTModel):
        def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
            return super()._postprocess(*args, **kwargs)

    install(config=CONFIG)
    model.__class__ = Mine
    assert_close(added(plain, gradients(model, *data)[1]), ours, 1)
    model.__class__ = GPTModel

    # An instance whose loss someone replaced, as distillation does: SimReg hangs on the per-token loss they return.
    compute = model.compute_language_model_loss
    model.compute_language_model_loss = types.MethodType(
        lambda self, labels, logits: 3 * compute(labels, logits), model
    )
    tripled = gradients(model, *data)[1]
    del model.compute_language_model_loss
    assert_close(added({name: 3 * value for name, value in plain.items()}, tripled), ours, 1)

    # An instance with a function of its own in the place of the wrapped one: it calls the class's, or is refused.
    model._postprocess = types.MethodType(
        lambda self, *args, **kwargs: GPTModel._postprocess(self, *args, **kwargs), model
    )
    assert_close(added(plain, gradients(model, *data)[1]), ours, 1)
    model._postprocess = types.MethodType(lambda self, **kwargs: kwargs["hidden_states"].sum(), model)
    try:
        gradients(model, *data)
    except NotImplementedError as error:
        assert "GPTModel._postprocess, but has a _postprocess of its own" in str(error)
    else:
        raise AssertionError("SimReg must not be hidden in silence")
    model.eval()
    with torch.no_grad():
        model(data[0], torch.arange(LENGTH).expand_as(data[0]), causal_mask(), labels=data[1])  # nothing is trained
    model.train()
    del model._postprocess

    # An output processor replaces the per-token loss: refused, not skipped.
    positions = torch.arange(LENGTH).expand_as(data[0])
    try:
        model(data[0], positions, causal_mask(), labels=data[1], output_processor=lambda **kwargs: torch.zeros(()))
    except NotImplementedError as error:
        assert "an output processor returns something else" in str(error)
    else:
        raise AssertionError("an output processor must be refused")
    uninstall()
    torch.distributed.destroy_process_group()
    print("coexist script: all as expected")


if __name__ == "__main__":
    main()
