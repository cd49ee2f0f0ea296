# SPDX-License-Identifier: Apache-2.0
"""AdaGC against independently computed numbers, and what must hold for every trajectory."""

import pytest
import torch
from torch import Tensor

from simreg_megatron.adagc import AdaGC
from simreg_megatron.config import AdaGCConfig

NORMS = [(3, 4), (1.2, 1.6), (2.4, 1), (0.55, 0.39), (2, 0.3), (0.5, 5), (0.58, 0.38)]


def trajectory(norms: list[tuple[float, float]], **options: object) -> tuple[Tensor, Tensor]:
    adagc = AdaGC(2, **options)
    adagc.gammas = adagc.gammas.double()
    steps = [(adagc.step(torch.tensor(pair, dtype=torch.float64) ** 2).coefficients, adagc.gammas) for pair in norms]
    coefficients, gammas = zip(*steps, strict=True)
    return torch.stack(coefficients), torch.stack(gammas)


def test_ag1() -> None:
    coefficients, gammas = trajectory(NORMS, warmup_iters=3)
    expected = [(0.2, 0.2), (0.5, 0.5), (0.384615, 0.384615), (1, 1), (0.31174, 1), (1, 0.0798350), (1, 1)]
    torch.testing.assert_close(coefficients, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    expected = [(0.6, 0.8), (0.6, 0.8), (0.6, 0.384615), (0.599499, 0.384669), (0.599739, 0.383822)]
    expected += [(0.598742, 0.383976), (0.598555, 0.383936)]
    torch.testing.assert_close(gammas, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1.5e-6)


def test_ag1_raw() -> None:
    coefficients, gammas = trajectory(NORMS, warmup_iters=3, variant="raw")
    expected = [(3, 4), (1.2, 1.6), (1.2, 1), (1.1935, 0.9939), (1.193977, 0.986961)]
    expected += [(1.187038, 0.987356), (1.180967, 0.981282)]
    torch.testing.assert_close(gammas, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    assert coefficients[4, 0].item() == pytest.approx(0.620620, abs=1e-6)
    assert coefficients[5, 1].item() == pytest.approx(0.205288, abs=1e-6)


def test_global_is_one_average() -> None:
    coefficients, gammas = trajectory(NORMS, warmup_iters=3, variant="global")
    assert gammas.shape == (7, 1) and (coefficients[:, 0] == coefficients[:, 1]).all()
    alone = AdaGC(1, warmup_iters=3)
    alone.gammas = alone.gammas.double()
    for pair, found in zip(NORMS, coefficients, strict=True):
        squares = torch.tensor([pair[0] ** 2 + pair[1] ** 2], dtype=torch.float64)
        torch.testing.assert_close(alone.step(squares).coefficients, found[:1])


@pytest.mark.parametrize("warmup_iters", [0, 2, 10])
def test_a_parameter_without_gradient_is_not_frozen(warmup_iters: int) -> None:
    norms = [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.3), (1.0, 0.3)]
    coefficients, gammas = trajectory(norms, warmup_iters=warmup_iters, lambda_abs=10.0)
    assert gammas[2, 1] == torch.inf, "not seen yet"
    assert (coefficients[3:, 1] == 1).all()
    assert gammas[4, 1] == pytest.approx(0.3)


@pytest.mark.parametrize("variant", ["clipped", "raw", "global"])
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize("warmup_iters", [1, 10])
def test_norms_that_are_not_finite_move_no_average(warmup_iters: int, broken: float, variant: str) -> None:
    adagc = AdaGC(2, warmup_iters=warmup_iters, variant=variant)
    for _ in range(3):
        adagc.step(torch.tensor([1.0, 4.0]))
    before = adagc.gammas.clone()
    adagc.step(torch.tensor([1.0, broken]))
    assert torch.equal(adagc.gammas, before)


IMPOSSIBLE = [
    ({"lambda_rel": 0}, "lambda-rel must be a finite number above 0"),
    ({"beta": 1}, "beta must be at least 0 and below 1"),
    ({"warmup_iters": 2.5}, "warmup iters must be a whole number, not 2.5"),
    ({"variant": "shard"}, "choose from clipped, raw, global"),
]


@pytest.mark.parametrize(("settings", "sentence"), IMPOSSIBLE)
def test_impossible_settings_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AdaGCConfig(**settings)


def test_an_independent_package_finds_the_same_averages() -> None:
    """pytorch-optimizer's AdaGC, an Adam with the clipping inside; its warm-up ends before the step it names."""
    package = pytest.importorskip("pytorch_optimizer")
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
    theirs = package.AdaGC(parameters, lr=0.0, weight_decay=0.0, beta=0.9, lambda_rel=1.1, warmup_steps=5)
    ours = AdaGC(3, lambda_rel=1.1, beta=0.9, warmup_iters=4)
    for step in range(12):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * (3.0 if step % 3 else 0.5)
        squares = torch.stack([parameter.grad.double().square().sum() for parameter in parameters])
        ours.step(squares)
        theirs.step()
        found = torch.stack([theirs.state[parameter]["gamma"] for parameter in parameters])
        torch.testing.assert_close(found.view(-1), ours.gammas, rtol=1e-5, atol=0)


def test_detached_heads_have_a_global_norm_of_their_own() -> None:
    """As in Megatron's own clipping: what they are fed cannot shrink the step of the model before them."""
    squares = torch.tensor([9.0, 16.0, 900.0], dtype=torch.float64)
    made = AdaGC(3, lambda_abs=1.0, separate=torch.tensor([False, False, True]))
    found = made.step(squares)
    assert found.coefficients.tolist() == pytest.approx([1 / 5, 1 / 5, 1 / 30], rel=1e-5)
    assert found.global_norm.item() == pytest.approx(925**0.5)
    together = AdaGC(3, lambda_abs=1.0).step(squares)
    assert together.coefficients[0] < 0.2 * found.coefficients[0]
