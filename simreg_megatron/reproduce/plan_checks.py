# SPDX-License-Identifier: Apache-2.0
"""What a plan may not be: numbers that nobody could mean, comparisons that are unfair or hold by themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import METRICS, SIGNS, Claim, Flags, Plan
from simreg_megatron.sentences import brief

MOST_RUNS = 10_000
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}")
_FAMILIES = ("llama", "mixtral")  # launch/pretrain_*.sh
_WIDEST = 65536
_MOST_TOKENS = 1e6  # for a parameter
_OF_A_HEADLINE = METRICS[:2]
_FALL_WITH_TRAINING = METRICS[:3]  # whatever the arm


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def refuse_unfair(plan: Plan, where: str) -> None:
    """All that this module is about.

    Raises:
        ReproduceError: naming the file, what is wrong, and what would be right.
    """
    _check_kinds(plan, where)
    _check(plan, where)


def _check_kinds(plan: Plan, where: str) -> None:
    """Words where words are needed, numbers where numbers are, and no more runs than a lifetime has room for."""
    for name in ("name", "question", "family", "tuned_in", "data", "source"):
        if not isinstance(getattr(plan, name), str):
            raise ReproduceError(f"{where}: {name} is text")
    if not _FILE_NAME.fullmatch(plan.name) or plan.name.endswith("-curves"):
        raise ReproduceError(
            f"{where}: the name is a word of letters, digits and -, without -curves at its end (files are named so)"
        )
    if plan.family not in _FAMILIES:
        raise ReproduceError(f"{where}: the family is {' or '.join(_FAMILIES)}, not {brief(plan.family)}")
    for size in plan.sizes:
        is_width = type(size) is int and 0 < size <= _WIDEST
        if not is_width and not (isinstance(size, str) and _FILE_NAME.fullmatch(size)):
            raise ReproduceError(
                f"{where}: a size is a width (at most {_WIDEST}) or the name of a preset, not {brief(size)}"
            )
    if not plan.sizes or not plan.tokens_per_parameter:
        raise ReproduceError(f"{where}: sizes and tokens_per_parameter must not be empty")
    if not all(is_number(ratio) and 0 < ratio <= _MOST_TOKENS for ratio in plan.tokens_per_parameter):
        raise ReproduceError(f"{where}: tokens_per_parameter are numbers above 0, at most {_MOST_TOKENS:,.0f}")
    for name in ("sizes", "tokens_per_parameter"):
        if len(set(getattr(plan, name))) < len(getattr(plan, name)):
            raise ReproduceError(f"{where}: {name} has a value twice: its runs would count twice")
    counts = _counts(plan)
    steps = list(plan.steps.values()) if isinstance(plan.steps, Mapping) else [None]
    if not all(type(count) is int for count in (*counts, *steps)):
        raise ReproduceError(f"{where}: seeds must be a whole number, or one per size; steps, one for some sizes")
    if not all(number > 0 for number in steps):
        raise ReproduceError(f"{where}: steps are above 0")
    refuse_too_many(plan, where)


def refuse_too_many(plan: Plan, where: str) -> None:
    """More runs than anybody could mean to start.

    Raises:
        ReproduceError: it asks for so many.
    """
    counts = _counts(plan)
    trials = max(len(arm.trials_of(size)) for arm in plan.arms for size in plan.sizes)
    runs = len(plan.sizes) * len(plan.tokens_per_parameter) * len(plan.arms) * max(1, trials) * max(counts, default=0)
    if runs > MOST_RUNS:
        told = f"{runs:,}" if runs < 1 << 64 else brief(runs)
        raise ReproduceError(f"{where} asks for {told} runs, and at most {MOST_RUNS:,} are allowed")


def _counts(plan: Plan) -> list[int]:
    """Of seeds, at all sizes that it names."""
    return list(plan.seeds.values()) if isinstance(plan.seeds, Mapping) else [plan.seeds]


def _check(plan: Plan, where: str) -> None:
    for size in plan.sizes:
        budgets = {arm.name: len(arm.trials_of(size)) for arm in plan.arms}
        if len(set(budgets.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in budgets.items())
            raise ReproduceError(
                f"{where} gives its arms unequal numbers of trials at size {size} ({told}): a comparison of unequally "
                "tuned arms means nothing, so give each the same number"
            )
        for arm in plan.arms:
            settings = {_setting(arm.flags | trial) for trial in arm.trials_of(size)}
            if len(settings) < budgets[arm.name]:
                raise ReproduceError(
                    f"{where}: {arm.name} tries the same setting twice at size {size}, and it counts once: give others"
                )
    for arm in plan.arms:
        if arm.tuned_as and not plan.tuned_in:
            raise ReproduceError(f"{where}: {arm.name} is tuned_as {arm.tuned_as}, and no tuned_in says where")
        if arm.trials and plan.tuned_in:
            raise ReproduceError(
                f"{where} is a search, as {arm.name} has trials: nothing tunes it, so leave out tuned_in"
            )
        if not 0 < arm.length <= 1:
            raise ReproduceError(f"{where}: the length of {arm.name} is a share of the plan's, above 0 and at most 1")
    if plan.is_search and plan.claims:
        raise ReproduceError(
            f"{where} is a search with claims: trials are not seeds, so put the claims into a plan that is tuned_in it"
        )
    asked = [(claim.arm, claim.than, claim.metric, claim.sign, claim.times) for claim in plan.claims]
    for claim in plan.claims:
        if asked.count((claim.arm, claim.than, claim.metric, claim.sign, claim.times)) > 1:
            raise ReproduceError(
                f"{where}: two claims compare the same ({claim.says!r} is one of them): it counts once"
            )
        _check_claim(claim, plan, f"{where}: the claim {claim.says!r}")
    if isinstance(plan.seeds, Mapping) and (lacking := [size for size in plan.sizes if str(size) not in plan.seeds]):
        raise ReproduceError(f"{where} says how many seeds at some sizes, and not at {lacking[0]}")
    if fewest := [size for size in plan.sizes if plan.seeds_at(size) < 1]:
        raise ReproduceError(f"{where}: seeds is a number of runs, at least 1, also at size {fewest[0]}")


def _setting(flags: Flags) -> frozenset[tuple[str, str | float]]:
    """The same for 0.001 and 1e-3, which is a word in YAML."""
    return frozenset((name, _number_in(value)) for name, value in flags.items())


def _number_in(word: str) -> str | float:
    try:
        return float(word)
    except ValueError:
        return word


def _check_claim(claim: Claim, plan: Plan, who: str) -> None:
    names = [arm.name for arm in plan.arms]
    for name in (claim.arm, claim.than):
        if name not in names:
            raise ReproduceError(f"{who} names {name}, and the arms are {names}")
    if claim.arm == claim.than:
        raise ReproduceError(f"{who} compares {claim.arm} with itself: name another arm as than")
    runs = [(_setting(arm.flags), arm.tuned_as, arm.length) for arm in (plan.arm(claim.arm), plan.arm(claim.than))]
    if runs[0] == runs[1]:
        raise ReproduceError(f"{who} compares {claim.arm} with {claim.than}, which are the same runs: set them apart")
    if claim.metric not in METRICS:
        raise ReproduceError(f"{who} is about {claim.metric}, and what is measured is {', '.join(METRICS)}")
    if not claim.times > 0 or (claim.times != 1 and claim.sign == "differs"):
        raise ReproduceError(f"{who} compares with a multiple above 0, lower or higher")
    if claim.times != 1 and claim.metric != "seconds_per_step":
        raise ReproduceError(f"{who} compares {claim.metric} with a multiple: times is for seconds_per_step alone")
    if claim.headline and claim.metric not in _OF_A_HEADLINE:
        raise ReproduceError(f"{who} is a headline, and those are about {' or '.join(_OF_A_HEADLINE)}")
    if claim.sign not in SIGNS:
        raise ReproduceError(f"{who} has the sign {claim.sign}: choose from {', '.join(SIGNS)}")
    longer = plan.arm(claim.arm).length - plan.arm(claim.than).length
    is_given = {"lower": longer > 0, "higher": longer < 0, "differs": longer != 0}[claim.sign]
    if is_given and claim.metric in _FALL_WITH_TRAINING:
        raise ReproduceError(
            f"{who} holds by itself, as one arm trains longer: compare arms of one length, or claim that the shorter "
            "one ends lower"
        )
