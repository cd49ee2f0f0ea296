# SPDX-License-Identifier: Apache-2.0
"""A plan: question, claims, arms, seeds, sizes and lengths of one experiment, read from a small YAML file.

Everything that decides what is run and what would count as success stands in the file, before the first run. What the
file leaves open, no flag can add later: the program has options for where and how fast to run, and for fewer seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from simreg_megatron.reproduce.errors import ReproduceError

PLANS = Path(__file__).resolve().parent / "plans"
SIGNS = ("lower", "higher", "differs")

Flags = dict[str, str]
"""Flags of launch/pretrain_*.sh without their dashes; "" is the value of a flag that stands alone."""


@dataclass(frozen=True)
class Arm:
    """One kind of run.

    Attributes:
        flags: what sets it apart.
        tuned_as: the arm of the plan's `tuned_in` whose best trial it takes over.
        trials: the settings that are tried, one run each; empty where an arm is run with its flags as they are.
        trials_at: others for some sizes, which may be fewer.
        preset: of an arm of a search: its flags beside a real size's preset, which has the paper's settings and which
            nobody searched.
        length: share of the plan's tokens that it trains on, with a schedule of its own that ends there.
    """

    name: str
    flags: Flags = field(default_factory=dict)
    tuned_as: str = ""
    trials: tuple[Flags, ...] = ()
    trials_at: Mapping[str, tuple[Flags, ...]] = field(default_factory=dict)
    preset: Flags = field(default_factory=dict)
    length: float = 1.0

    def trials_of(self, size: int | str) -> tuple[Flags, ...]:
        return self.trials_at.get(str(size), self.trials)


@dataclass(frozen=True)
class Claim:
    """A sentence that the runs may refute: `metric` of `arm` is lower (or higher) than `times` that of `than`."""

    says: str
    arm: str
    than: str
    metric: str = "validation_loss"
    sign: str = "lower"
    times: float = 1.0
    headline: bool = False  # to be told first, so it needs more seeds


@dataclass(frozen=True)
class Plan:
    """One experiment.

    Attributes:
        sizes: widths of the small family (`shapes.Shape`), or names of presets such as "tiny" and "350m".
        tokens_per_parameter: training tokens for each parameter outside the embeddings, one or several lengths.
        seeds: how many, counted from 1, or how many at each size.
        tuned_in: the experiment whose best trials the arms take over; "" where every arm is run as it is written.
        data: "large", "builtin", or a folder with train, valid and tokenizer.model.
        steps: of a preset, where they are not the preset's own.
        source: the figure or table of the paper.
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    family: str = "llama"
    sizes: tuple[int | str, ...] = (64,)
    tokens_per_parameter: tuple[float, ...] = (20.0,)
    seeds: int | Mapping[str, int] = 3
    tuned_in: str = ""
    data: str = "large"
    steps: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def seeds_at(self, size: int | str) -> int:
        return self.seeds if isinstance(self.seeds, int) else self.seeds[str(size)]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def is_search(self) -> bool:
        return any(arm.trials for arm in self.arms)


def as_content(plan: Plan) -> dict[str, Any]:
    """What `plan_of` makes the same plan of."""
    content = asdict(plan)
    content["arms"] = {arm.pop("name"): arm for arm in content["arms"]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}


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
    claims = tuple(Claim(**_known(claim, Claim, f"{where}: claims")) for claim in entries.pop("claims", None) or ())
    for name in ("sizes", "tokens_per_parameter"):
        if name in entries:
            entries[name] = tuple(entries[name] if isinstance(entries[name], list) else [entries[name]])
    if isinstance(entries.get("seeds"), Mapping):
        entries["seeds"] = {str(size): number for size, number in entries["seeds"].items()}
    plan = Plan(arms=arms, claims=claims, **entries)
    _check(plan, where)
    return plan


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
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
        entries[own] = _flags(entries.get(own) or {})
    entries["trials"] = _trials(entries.get("trials") or (), f"{where}: trials of {name}")
    at = entries.get("trials_at") or {}
    entries["trials_at"] = {str(size): _trials(own, f"{where}: trials of {name} at {size}") for size, own in at.items()}
    return Arm(**entries)


def _flags(content: Mapping[str, Any]) -> Flags:
    return {name: "" if value is None else _word(value) for name, value in content.items()}


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _trials(content: Any, where: str) -> tuple[Flags, ...]:
    """A list of settings as it stands; a mapping of flags to lists of values stands for all combinations."""
    if isinstance(content, Mapping):
        if not all(isinstance(values, list) and values for values in content.values()):
            raise ReproduceError(f"{where}: give each flag a list of values")
        return tuple(_flags(dict(zip(content, values, strict=True))) for values in itertools.product(*content.values()))
    return tuple(_flags(trial) for trial in content)


def _check(plan: Plan, where: str) -> None:
    names = [arm.name for arm in plan.arms]
    for size in plan.sizes:
        budgets = {arm.name: len(arm.trials_of(size)) for arm in plan.arms}
        if len(set(budgets.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in budgets.items())
            raise ReproduceError(
                f"{where} gives its arms unequal numbers of trials at size {size} ({told}): a comparison of unequally "
                "tuned arms means nothing, so give each the same number"
            )
    for claim in plan.claims:
        for name in (claim.arm, claim.than):
            if name not in names:
                raise ReproduceError(f"{where}: the claim {claim.says!r} names {name}, and the arms are {names}")
        if not claim.times > 0 or (claim.times != 1 and claim.sign == "differs"):
            raise ReproduceError(f"{where}: the claim {claim.says!r} compares with a multiple above 0, lower or higher")
        if claim.sign not in SIGNS:
            raise ReproduceError(f"{where}: the sign of a claim is one of {', '.join(SIGNS)}, not {claim.sign}")
    for arm in plan.arms:
        if arm.tuned_as and not plan.tuned_in:
            raise ReproduceError(f"{where}: {arm.name} is tuned_as {arm.tuned_as}, and no tuned_in says where")
        if not 0 < arm.length <= 1:
            raise ReproduceError(f"{where}: the length of {arm.name} is a share of the plan's, above 0 and at most 1")
    if isinstance(plan.seeds, Mapping) and (lacking := [size for size in plan.sizes if str(size) not in plan.seeds]):
        raise ReproduceError(f"{where} says how many seeds at some sizes, and not at {lacking[0]}")
    if fewest := [size for size in plan.sizes if plan.seeds_at(size) < 1]:
        raise ReproduceError(f"{where}: seeds is a number of runs, at least 1, also at size {fewest[0]}")
