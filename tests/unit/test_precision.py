# SPDX-License-Identifier: Apache-2.0
"""Products in full float32 under a process that allows TensorFloat-32, shown by the setting that each product meets."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simreg_megatron.contrib.mic import MICOptions
from simreg_megatron.kernels.precision import full_float32, product
from simreg_megatron.losses import (
    dispersion_loss,
    mic_loss,
    prefixes_ce_loss,
    sigmoid_loss,
    sigreg_loss,
    simcse_loss,
    simreg_loss,
)  # fmt: skip
from simreg_megatron.losses.geometry import moments, pair_cosines

PRODUCTS = ("mm", "bmm", "addmm", "addbmm", "baddbmm", "baddbmm_", "matmul")


def allows_rounding() -> str | None:
    try:
        return "allow_tf32" if torch.backends.cuda.matmul.allow_tf32 else None
    except RuntimeError:  # the two names of it disagree
        return "fp32_precision"


class Settings(TorchDispatchMode):
    """Return whether each product of floats found TensorFloat-32 allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.allowed.append(allows_rounding() is not None)
        return func(*args, **(kwargs or {}))


HAS_NEW_NAME = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def allow() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def allow_by_new_name() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def allow_more() -> None:
    torch.set_float32_matmul_precision("medium")


WAYS = [allow, allow_more, *([allow_by_new_name] if HAS_NEW_NAME else [])]


def settings_of_products() -> list[Any]:
    """Return the settings as the process reads them; an error if the old name and the new disagree."""
    found: list[Any] = []
    matmul = torch.backends.cuda.matmul
    names = [lambda: matmul.allow_tf32, torch.get_float32_matmul_precision]
    names += [lambda: matmul.fp32_precision, lambda: torch.backends.mkldnn.matmul.fp32_precision] * HAS_NEW_NAME
    for name in names:
        try:
            found.append(name())
        except RuntimeError:
            found.append(RuntimeError)
    return found


def as_at_first() -> None:
    torch.set_float32_matmul_precision("highest")
    if HAS_NEW_NAME:
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    before = settings_of_products()
    allow()
    yield
    as_at_first()
    assert settings_of_products() == before


def rows_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 24, 16, generator=generator, requires_grad=True), torch.arange(72).view(3, 24) % 5


LOSSES = {
    "reference": lambda rows, labels: simreg_loss(rows, labels, impl="reference"),
    "tiled": lambda rows, labels: simreg_loss(rows.bfloat16(), labels, impl="tiled"),
    "dot": lambda rows, labels: simreg_loss(rows, labels, similarity="dot"),
    "sigmoid": sigmoid_loss,
    "simcse": lambda rows, labels: simcse_loss(rows, labels),
    "qnorm": lambda rows, labels: simreg_loss(rows, labels, similarity="qnorm"),
    "learnable": lambda rows, labels: simreg_loss(rows, labels, similarity="learnable", exponents=torch.ones(2)),
    "sigreg": lambda rows, labels: sigreg_loss(rows, labels, directions=torch.eye(3, 16)),
    "dispersion": dispersion_loss,
    "mic": lambda rows, labels: mic_loss(rows, labels, options=MICOptions(prefixes=(4, 8))),
    "prefixes-ce": lambda rows, labels: prefixes_ce_loss(rows, labels, torch.eye(5, 16), prefixes=(4, 8)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_forward_and_backward_of_a_loss(name: str) -> None:
    rows, labels = rows_and_labels()
    with Settings() as seen:
        loss = LOSSES[name](rows, labels)
        forward = len(seen.allowed)
        loss.backward()
    assert forward and len(seen.allowed) > forward, "products both ways"
    assert not any(seen.allowed)


@pytest.mark.parametrize("name", LOSSES)
def test_a_backward_under_autocast(name: str) -> None:
    grads = []
    for is_on in (False, True):
        rows, labels = rows_and_labels()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            LOSSES[name](rows, labels).backward()
        grads.append(rows.grad)
    assert torch.equal(*grads)


def test_the_tiled_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies into memory of its own, which `Settings` does not look at: the products themselves tell."""
    met: list[str] = []

    def noted(name: str, product: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            met.append(f"{name} {allows_rounding()}")
            return product(*args, **kwargs)

        return telling

    monkeypatch.setattr(torch.Tensor, "baddbmm_", noted("product", torch.Tensor.baddbmm_))
    rows, labels = rows_and_labels()
    loss = simreg_loss(rows, labels, impl="tiled")
    assert {*met} == {"product None"}
    loss.backward()
    assert len(met) > 1 and {*met} == {"product None"}


def test_the_geometry() -> None:
    rows, labels = rows_and_labels()
    with Settings() as seen:
        pair_cosines(rows.detach(), labels)
        moments(rows.detach(), labels >= 0)
    assert seen.allowed and not any(seen.allowed)


def test_it_shows_where_a_product_would_round() -> None:
    rows, _ = rows_and_labels()
    with Settings() as seen:
        (rows @ rows.mT).sum().backward()
    assert all(seen.allowed)


@pytest.mark.parametrize("way", WAYS)
def test_the_setting_is_given_back_also_after_an_error(way: Callable[[], None]) -> None:
    as_at_first()
    way()
    before = settings_of_products()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        product(torch.ones(2, 3), torch.ones(2, 3))
    assert settings_of_products() == before
    with full_float32():
        assert allows_rounding() is None
        assert not HAS_NEW_NAME or torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none"), "bfloat16 on a CPU"
        assert torch.backends.cuda.matmul.allow_tf32 is False, "no error either, where TunableOp reads it"
    assert settings_of_products() == before


def test_products_that_broadcast_have_gradients_of_their_own_shape() -> None:
    left, right = torch.randn(4, 3, 5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(product, (left.requires_grad_(), right.requires_grad_()))


def test_half_precision_products_add_up_in_float32() -> None:
    """A process that lets float16 add up in float16 had every fast form refused by cuBLAS."""
    settings = torch.backends.cuda.matmul
    if not hasattr(settings, "allow_fp16_accumulation"):
        pytest.skip("this torch has no such setting")
    settings.allow_fp16_accumulation = True
    try:
        with full_float32():
            assert not settings.allow_fp16_accumulation
        assert settings.allow_fp16_accumulation
    finally:
        settings.allow_fp16_accumulation = False
