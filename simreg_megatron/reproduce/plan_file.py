# SPDX-License-Identifier: Apache-2.0
"""Plans as YAML files: what is read, and what is refused with the file, the cause and what would be right."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import METRICS, SIGNS, Arm, Claim, Flags, Plan

PLANS = Path(__file__).resolve().parent / "plans"
_MOST_RUNS = 10_000
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}")
_FLAG = re.compile(r"[A-Za-z0-9][\w-]*")
_OF_A_HEADLINE = METRICS[:2]
_FALL_WITH_TRAINING = METRICS[:3]  # whatever the arm

# What the program sets itself, or what makes runs comparable: size, text, length and schedule, what is read and when.
_SAME_IN_ALL_ARMS = {
    "model", "hidden-size", "ffn", "ffn-hidden-size", "num-layers", "num-attention-heads", "seq-length",
    "global-batch-size", "rampup-batch-size", "train-iters", "train-samples", "exit-interval", "exit-duration-in-mins",
    "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction", "min-lr",
    "decoupled-min-lr", "seed", "data", "valid-data", "tokenizer", "tokenizer-type", "tokenizer-model", "data-path",
    "train-data-path", "valid-data-path", "data-args-path", "per-split-data-args-path", "mock-data", "split",
    "data-cache-path", "output", "save", "load", "tensorboard-dir", "auto-resume", "save-interval", "eval-iters",
    "eval-interval", "full-validation", "log-interval", "log-timers-to-tensorboard",
}  # fmt: skip


def plan_names() -> list[str]:
    """The experiments that ship with the package."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def read_plan(name_or_path: str) -> Plan:
    """The plan of that name, or in that file.

    Raises:
        ReproduceError: there is none, or it is not a plan.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = PLANS / f"{name_or_path}.yaml"
        if not path.is_file():
            raise ReproduceError(
                f"there is no experiment {name_or_path}: choose from {', '.join(plan_names())}, "
                "or name a file that ends with .yaml"
            )
    return plan_of(_read_yaml(path), where=str(path))


def plan_of(content: Any, *, where: str) -> Plan:
    """The plan that a YAML file's content says.

    Raises:
        ReproduceError: naming the file, what is wrong, and what would be right.
    """
    entries = _known(content, Plan, where)
    for name in ("name", "question", "arms"):
        if not entries.get(name):
            raise ReproduceError(f"{where} has no {name}: every plan states one")
    if not isinstance(entries["arms"], Mapping):
        raise ReproduceError(f"{where}: arms is a mapping, each arm's name with its flags below it")
    arms = tuple(_arm(name, arm or {}, where) for name, arm in entries.pop("arms").items())
    claims = tuple(_claim(claim, where) for claim in _list(entries.pop("claims", None), f"{where}: claims"))
    for name in ("sizes", "tokens_per_parameter"):
        if name in entries:
            entries[name] = tuple(entries[name] if isinstance(entries[name], list) else [entries[name]])
    for name in ("seeds", "steps"):
        if isinstance(entries.get(name), Mapping):
            entries[name] = {str(size): number for size, number in entries[name].items()}
    plan = Plan(arms=arms, claims=claims, **entries)
    _check_kinds(plan, where)
    _check(plan, where)
    return plan


def _read_yaml(path: Path) -> Any:
    """Data alone, and as much as the file has letters: aliases to lists of aliases could stand for a million values."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ReproduceError(f"{path} has an alias (*NAME), which no plan needs: write out what it stands for")
        return yaml.safe_load(text)
    except ReproduceError:
        raise
    except (
        Exception
    ) as error:  # beside its own errors, whatever a number or date that is none makes of its constructors
        raise ReproduceError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None


def _known(content: Any, kind: type, where: str) -> dict[str, Any]:
    """The mapping, if all its keys are fields of the class."""
    if not isinstance(content, Mapping):
        raise ReproduceError(f"{where}: expected a mapping of {', '.join(entry.name for entry in fields(kind))}")
    names = [entry.name for entry in fields(kind)]
    for name in content:
        if name not in names:
            raise ReproduceError(f"{where} has the unknown key {name}: the keys are {', '.join(names)}")
    return dict(content)


def _arm(name: str, content: Any, where: str) -> Arm:
    entries = _known({"name": name, **content} if isinstance(content, Mapping) else content, Arm, f"{where}: {name}")
    for own in ("flags", "preset"):
        entries[own] = _flags(entries.get(own) or {}, f"{where}: {own} of {name}")
    entries["trials"] = _trials(entries.get("trials") or (), f"{where}: trials of {name}")
    at = entries.get("trials_at") or {}
    if not isinstance(at, Mapping):
        raise ReproduceError(f"{where}: trials_at of {name} is a mapping, each size with its trials")
    entries["trials_at"] = {str(size): _trials(own, f"{where}: trials of {name} at {size}") for size, own in at.items()}
    arm = Arm(**entries)
    if not isinstance(arm.name, str) or not isinstance(arm.tuned_as, str) or not _is_number(arm.length):
        raise ReproduceError(
            f"{where}: {name} needs a name and a tuned_as that are words, and a length that is a number"
        )
    return arm


def _claim(content: Any, where: str) -> Claim:
    claim = Claim(**{"says": "", "arm": "", "than": "", **_known(content, Claim, f"{where}: claims")})
    words = (claim.says, claim.arm, claim.than, claim.metric, claim.sign)
    if not all(isinstance(word, str) and word for word in words) or not _is_number(claim.times):
        raise ReproduceError(f"{where}: a claim has words as says, arm, than, metric and sign, and a number as times")
    if not isinstance(claim.headline, bool):
        raise ReproduceError(f"{where}: the headline of the claim {claim.says!r} is true or false, without quotes")
    return claim


def _list(content: Any, where: str) -> list[Any]:
    if content is not None and not isinstance(content, list):
        raise ReproduceError(f"{where}: expected a list")
    return content or []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _flags(content: Any, where: str) -> Flags:
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str)
        and _FLAG.fullmatch(name)
        and isinstance(value, str | int | float | None)
        and not str(value).startswith("--")
        for name, value in content.items()
    ):
        raise ReproduceError(f"{where}: give each flag, without its dashes, one word or number")
    if fixed := sorted(_SAME_IN_ALL_ARMS & set(content)):
        raise ReproduceError(
            f"{where} may not set {fixed[0]}, which is decided for all arms alike: leave it out (sizes, steps, "
            "tokens_per_parameter, length, seeds and data decide)"
        )
    return {name: "" if value is None else _word(value) for name, value in content.items()}


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _trials(content: Any, where: str) -> tuple[Flags, ...]:
    """A list of settings as it stands; a mapping of flags to lists of values stands for all combinations."""
    if isinstance(content, Mapping):
        if not all(isinstance(values, list) and values for values in content.values()):
            raise ReproduceError(f"{where}: give each flag a list of values")
        if math.prod(map(len, content.values())) > _MOST_RUNS:
            raise ReproduceError(f"{where}: its lists make more than {_MOST_RUNS:,} combinations: give shorter ones")
        found = itertools.product(*content.values())
        return tuple(_flags(dict(zip(content, values, strict=True)), where) for values in found)
    return tuple(
        _flags(trial, where) for trial in _list(list(content) if isinstance(content, tuple) else content, where)
    )


def _check_kinds(plan: Plan, where: str) -> None:
    """Words where words are needed, numbers where numbers are, and no more runs than a lifetime has room for."""
    for name in ("name", "question", "family", "tuned_in", "data", "source"):
        if not isinstance(getattr(plan, name), str):
            raise ReproduceError(f"{where}: {name} is text")
    if not _FILE_NAME.fullmatch(plan.name) or not _FILE_NAME.fullmatch(plan.family):
        raise ReproduceError(f"{where}: name and family are words of letters, digits and - (files are named so)")
    for size in plan.sizes:
        if type(size) is not int and not (isinstance(size, str) and _FILE_NAME.fullmatch(size)):
            raise ReproduceError(f"{where}: a size is a width or the name of a preset, not {size!r}")
    if not plan.sizes or not all(map(_is_number, plan.tokens_per_parameter)):
        raise ReproduceError(f"{where}: sizes must not be empty, and tokens_per_parameter must be numbers")
    counts = [*(plan.seeds.values() if isinstance(plan.seeds, Mapping) else [plan.seeds])]
    steps = plan.steps.values() if isinstance(plan.steps, Mapping) else [None]
    if not all(type(count) is int for count in (*counts, *steps)):
        raise ReproduceError(f"{where}: seeds must be a whole number, or one per size; steps, one for some sizes")
    trials = max(len(arm.trials_of(size)) for arm in plan.arms for size in plan.sizes)
    runs = len(plan.sizes) * len(plan.tokens_per_parameter) * len(plan.arms) * max(1, trials) * max(counts)
    if runs > _MOST_RUNS:
        raise ReproduceError(f"{where} asks for {runs:,} runs, and at most {_MOST_RUNS:,} are allowed")


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
        if not 0 < arm.length <= 1:
            raise ReproduceError(f"{where}: the length of {arm.name} is a share of the plan's, above 0 and at most 1")
    if plan.is_search and plan.claims:
        raise ReproduceError(
            f"{where} is a search with claims: trials are not seeds, so put the claims into a plan that is tuned_in it"
        )
    for claim in plan.claims:
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
