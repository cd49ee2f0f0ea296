# SPDX-License-Identifier: Apache-2.0
"""Settings are checked when they are made, each refusal in one sentence."""

import dataclasses
import math
import pickle
from collections.abc import Callable

import pytest

from simreg_megatron import SimRegConfig
from simreg_megatron.config.schedule import Schedule, parsed

OF_SEVERAL_OBJECTIVES = [
    ({"objective": "simreg,sigreg:1"}, "several different ones with a weight each, such as simreg:auto,sigreg:0.05"),
    ({"objective": "simreg:1,sigreg:0"}, "objective sigreg has weight 0"),
    ({"objective": "simreg:1,sigreg:1", "lambda_": 2}, "write it after the name, as in simreg:2.0"),
    ({"objective": "simreg:1,sigreg:1", "objective_options": "seed=1"}, "as in simreg.seed, and 'seed' does not"),
    ({"objective": "sigreg:1,mic:1", "similarity": "dot"}, "similarity dot has no effect on any of sigreg:1,mic:1"),
    ({"objective": "creg:1,sce:1", "temperature": 0.1}, "such as creg.temperature=0.1"),
    ({"objective": "sigreg:1", "objective_options": "sigreg.temperature=1"}, "sigreg has no temperature"),
    ({"objective": "sigreg:1,mic:1", "temperature": 0.1}, "belongs to none of sigreg:1,mic:1: drop it"),
    ({"objective": "sce:1", "temperature": 0.2, "objective_options": "sce.temperature=0.1"}, "0.2 has no effect next"),
    ({"objective": "simreg:1,prefixes-ce:1", "layers": "2,final"}, "prefixes-ce is of the final states"),
]
WITH_A_LAMBDA = [
    ({"lambda_schedule": "linear"}, "such as linear:0.1 or cosine:0, not 'linear'"),
    ({"lambda_schedule": "cosine:inf"}, "a share from 0 to 1,000"),
    ({"off_after": 1.0}, "above 0 and below 1, not 1: drop it"),
    ({"objective": "sigreg", "temperature": 0.1}, "objective sigreg has no temperature"),
    ({"objective": "sigreg", "scope": "local"}, "scope local has no effect on objective sigreg"),
    ({"objective": "sigreg", "objective_options": "directions=2.5"}, "must be a whole number of 0 or more, not '2.5'"),
    ({"objective": "sigreg", "objective_options": "estimator=median"}, "must be one of mean, epps-pulley"),
    ({"objective": "prefixes-ce", "layers": "3,final"}, "layers 3,final has no effect on objective prefixes-ce: drop"),
    ({"objective": "creg", "objective_options": "from=per_pair"}, "from=per_pair: its options are form, self"),
    ({"objective": "creg", "objective_options": "form=per_pair"}, "a chunk size of at most 256, not 1024"),
    ({"objective": "sce", "objective_options": "keys=ema"}, "not support keys=ema: its options are target"),
    ({"objective": "cpretrain", "objective_options": "level=sequence", "chunk_size": 64}, "64 has no effect"),
    ({"objective": "mic", "objective_options": "uniformity=0,t=5"}, "t has no effect with uniformity=0: drop it"),
    ({"objective": "sce", "objective_options": "coupling=0,target=instance"}, "target has no effect with coupling=0"),
    ({"objective": "placebo", "objective_options": "labels=none,seed=3"}, "seed has no effect with labels=none"),
    ({"objective": "placebo", "objective_options": "labels=none", "self_positive": "never"}, "never has no effect"),
    (
        {"objective": "mic", "objective_options": "balance=0,uniformity=0,pool=token"},
        "pool has no effect with balance=0 and uniformity=0",
    ),
    ({"objective": "sigmoid", "objective_options": "adapter=yes"}, "modality, so it needs pairs=hidden-head"),
    ({"objective": "sigmoid", "objective_options": "pairs=hidden-head,self_positive=always"}, "positive has no effect"),
    ({"objective": "sigmoid", "objective_options": "pair_reduction=max"}, "must be one of anchor, pair, balanced"),
    ({"objective": "sigreg", "objective_options": "seed=1,sigreg.seed=2"}, "given more than once: leave one of them"),
    ({"objective": "sigreg", "objective_options": {"seed": True}}, "must be a whole number of 0 or more, not True"),
    ({"objective": "mic", "objective_options": "threshold=1"}, "threshold must be from 0 to 0.99, not 1"),
    ({"objective": "mic", "objective_options": "balance=0,uniformity=0", "chunk_size": 8}, "size 8 has no effect"),
]


IMPOSSIBLE = [
    ({"lambda_": 1, "every": 2.5}, "SimReg every must be a whole number, not 2.5"),
    ({"lambda_": 1, "start_iter": -1}, "SimReg start iter must be 0 or more, not -1"),
    ({"objective": "none", "start_iter": 5}, "SimReg start iter has no effect while lambda is 0"),
    ({"log_interval": "5"}, "SimReg log interval must be a whole number, not '5'"),
    ({"document_mask": "no"}, "SimReg document mask must be True or False, not 'no'"),
    ({"temperature": "0.1"}, "SimReg temperature must be a number, not '0.1'"),
    ({"objective": 3}, "SimReg objective must be a word, not 3"),
    ({"lambda_": True}, "of 0 or more, or auto, not True"),
    ({"lambda_": 1, "layers": ()}, "SimReg layers must be final, or layer numbers from 1 such as 12,24,final; not"),
    ({"objective": "creg", "lambda_": 1, "objective_options": ("form",)}, "a mapping, pairs, or text .*'form'"),
    ({"impl": "tiled", "similarity": "dot"}, "use impl reference, or auto"),
    ({"objective": "simreg:1,sigmoid:1", "objective_options": "sigmoid.trains=t", "every": 2}, "leaves scalars"),
    ({"group_reduce": "mean", "chunk_weight": "count-corrected"}, "no effect with group reduce mean"),
    (
        {"lambda_": 1, "chunk_size": 0, "chunk_weight": "uniform"},
        "SimReg chunk weight uniform has no effect with chunk size 0, .* give a chunk size, or drop the weight",
    ),
    *OF_SEVERAL_OBJECTIVES,
    *(({"lambda_": 1, **settings}, sentence) for settings, sentence in WITH_A_LAMBDA),
]


@pytest.mark.parametrize(("settings", "sentence"), IMPOSSIBLE)
def test_impossible_settings_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        SimRegConfig(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("hidden_size", "weight"), [(1024, 10.0), (2048, 14.142136), (3072, 17.320508), (4096, 20.0)])
def test_auto_lambda_follows_the_width(hidden_size: int, weight: float) -> None:
    assert SimRegConfig(lambda_="auto").weight(hidden_size) == pytest.approx(weight, abs=5e-7)
    assert SimRegConfig(lambda_="3").weight(hidden_size) == 3.0


def test_off_measuring_and_training() -> None:
    assert not SimRegConfig().active
    measuring = SimRegConfig(objective="none")
    assert measuring.active and not measuring.trains
    training = SimRegConfig(lambda_=10)
    assert training.active and training.trains
    with pytest.raises(dataclasses.FrozenInstanceError):
        training.lambda_ = 0


def test_several_objectives_each_with_a_weight() -> None:
    config = SimRegConfig(
        objective="simreg:auto,sigreg:0.05,sce:1", objective_options="sigreg.seed=3,sce.temperature=0.2",
        temperature=0.02, chunk_size=64, similarity="dot", scope="local", warmup_iters=5,
    )  # fmt: skip
    assert config.active and config.trains
    simreg, sigreg, sce = config.parts
    assert (simreg.lambda_, sigreg.lambda_, sce.lambda_) == ("auto", 0.05, 1.0)
    assert (simreg.tau, sce.tau) == (0.02, 0.2) and sigreg.options["seed"] == 3
    assert (simreg.similarity, sce.similarity) == ("dot", "cosine")
    assert (simreg.scope, sigreg.scope, sce.scope) == ("local", "exact", "local")
    assert {part.chunk_size for part in config.parts} == {64} and {part.warmup_iters for part in config.parts} == {5}
    again = dataclasses.replace(config, chunk_size=32)
    assert again.parts[2].tau == 0.2 and again.parts[0].chunk_size == 32 and again.parts[1].options["seed"] == 3
    (alone,) = SimRegConfig(lambda_=3).parts
    assert alone == SimRegConfig(lambda_=3) and SimRegConfig(objective="simreg:3").parts == (alone,)


def test_options_may_be_a_mapping() -> None:
    by_text = SimRegConfig(objective="creg", lambda_=1, objective_options="form=supcon_out")
    assert SimRegConfig(objective="creg", lambda_=1, objective_options={"form": "supcon_out"}) == by_text


def test_a_used_config_can_be_pickled() -> None:
    config = SimRegConfig(lambda_=1, objective="creg")
    assert config.is_simreg is False and config.options
    assert pickle.loads(pickle.dumps(config)) == config


LENGTH = 40
CLOSED_FORMS: dict[str, Callable[[int], float]] = {
    "linear:0": lambda i: 1 - i / 40,
    "linear:3": lambda i: 1 + 2 * i / 40,
    "cosine:0": lambda i: math.cos(math.pi * i / 80) ** 2,
    "cosine:0.2": lambda i: 0.2 + 0.8 * math.cos(math.pi * i / 80) ** 2,
}


@pytest.mark.parametrize("text", CLOSED_FORMS)
def test_lambda_follows_its_shape_to_the_end(text: str) -> None:
    schedule = parsed(text, 0, None)
    for iteration in (0, 1, 13, 20, 39):
        assert schedule.factor(iteration, LENGTH) == pytest.approx(CLOSED_FORMS[text](iteration), rel=1e-12)
    end = float(text.partition(":")[2])
    assert schedule.factor(40, LENGTH) == schedule.factor(60, LENGTH) == pytest.approx(end, abs=1e-12)


def test_a_warm_up_and_an_early_end_join_in() -> None:
    """With 40 iterations and half of them on, the way down is 20 iterations long and half as steep."""
    schedule = parsed("linear:0.5", 4, 0.5)
    expected = {0: 0.25, 1: 0.5 * (1 - 0.5 / 20), 3: 1 - 1.5 / 20, 10: 0.75, 19: 1 - 9.5 / 20, 20: 0.0, 39: 0.0}
    assert {i: schedule.factor(i, LENGTH) for i in expected} == pytest.approx(expected, rel=1e-12)
    assert [i for i in range(LENGTH) if schedule.is_off(i, LENGTH)] == list(range(20, LENGTH))
    assert parsed("constant", 4, None).factor(1) == 0.5, "a warm-up alone asks for no length"


@pytest.mark.parametrize(("share", "iterations", "on"), [(0.7, 10, 7), (0.25, 6, 2), (1 / 3, 10, 3), (0.5, 1001, 500)])
def test_a_share_of_the_training_is_whole_iterations(share: float, iterations: int, on: int) -> None:
    schedule = Schedule(off_after=share)
    assert sum(schedule.factor(i, iterations) for i in range(iterations)) == on
    assert not schedule.is_off(on - 1, iterations) and schedule.is_off(on, iterations)


@pytest.mark.parametrize(("share", "words"), [(0.01, "is no iteration"), (0.99, "is all of them")])
def test_a_share_that_the_training_is_too_short_for_is_refused(share: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(off_after=share).factor(0, 10)


def test_a_term_that_begins_under_way_rises_and_falls_from_there() -> None:
    """From 8 on, with half of 40 iterations: the way down is 12 iterations long."""
    schedule = parsed("linear:0.5", 4, 0.5, 8)
    expected = {0: 0.0, 7: 0.0, 8: 0.25, 9: 0.5 * (1 - 0.5 / 12), 11: 1 - 1.5 / 12, 14: 0.75, 19: 1 - 5.5 / 12, 20: 0.0}
    assert {i: schedule.factor(i, LENGTH) for i in expected} == pytest.approx(expected, rel=1e-12)
    assert [i for i in range(LENGTH) if not schedule.is_off(i, LENGTH)] == list(range(8, 20))
    alone = parsed("constant", 0, None, 8)
    assert not alone.is_constant and not alone.needs_length
    assert [alone.factor(i) for i in (0, 7, 8, 99)] == [0, 0, 1, 1]


def test_a_term_that_would_begin_after_its_end_is_refused() -> None:
    for start, share, end in ((40, None, 40), (20, 0.5, 20)):
        with pytest.raises(ValueError, match=f"--simreg-start-iter {start} leaves no iteration .* ends at {end}"):
            parsed("constant", 0, share, start).end(LENGTH)
        assert parsed("constant", 0, share, start - 1).end(LENGTH) == end
