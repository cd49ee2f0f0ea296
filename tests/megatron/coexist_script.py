# SPDX-License-Identifier: Apache-2.0
"""The plugin with other wrappers of the same function, in either order, and with functions of an instance's own."""

from typing import Any

import pytest
import torch

from simreg_megatron import install, uninstall
from simreg_megatron.cpu import backend as cpu_backend
from tests.megatron.own_script import CONFIG, LENGTH, build_model, causal_mask, gradients, sample, start

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
    from megatron.core.models.gpt import GPTModel

    start()
    model = build_model()
    data = sample()
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
    with pytest.raises(RuntimeError, match="wrapped again after SimReg: undo that first"):
        uninstall()
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
    with pytest.raises(NotImplementedError, match="this Deaf ended a training forward pass"):
        model()
    uninstall()
    model()  # and is left alone afterwards
    model.__class__ = GPTModel

    install(config=CONFIG)
    # An instance whose loss someone replaced, as distillation does: SimReg hangs on the per-token loss they return.
    compute = model.compute_language_model_loss
    model.compute_language_model_loss = lambda labels, logits: 3 * compute(labels, logits)
    tripled = gradients(model, *data)[1]
    del model.compute_language_model_loss
    assert_close(added({name: 3 * value for name, value in plain.items()}, tripled), ours, 1)

    # An instance with a function of its own in the place of the wrapped one: it calls the class's, or is refused.
    model._postprocess = lambda *args, **kwargs: GPTModel._postprocess(model, *args, **kwargs)
    assert_close(added(plain, gradients(model, *data)[1]), ours, 1)
    model._postprocess = lambda **kwargs: kwargs["hidden_states"].sum()
    with pytest.raises(NotImplementedError, match=r"GPTModel\._postprocess: make the _postprocess or forward"):
        gradients(model, *data)
    model.eval()
    with torch.no_grad():
        model(data[0], torch.arange(LENGTH).expand_as(data[0]), causal_mask(), labels=data[1])  # nothing is trained
    model.train()
    del model._postprocess
    uninstall()
    print("coexist script: all as expected")
