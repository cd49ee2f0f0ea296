# SPDX-License-Identifier: Apache-2.0
"""A plan: question, claims, arms, seeds and sizes of one experiment, in a small YAML file written before its first run.

A run is known by its flags and its data alone, so experiments share the runs they have in common.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simreg_megatron.notices import SentenceError

ROOT = Path(__file__).resolve().parents[1]
PLANS = Path(__file__).resolve().parent / "plans"

Flags = dict[str, str]
"""Flags of launch/pretrain_*.sh without their dashes; "" is the value of a flag that stands alone."""
Settings = Callable[[str, "int | str"], Flags]
"""(arm of a search, size) -> the flags of its best trial."""


class ResearchError(SentenceError):
    """A plan, a table or a run that cannot be used."""


@dataclass(frozen=True)
class Arm:
    """One kind of run.

    Attributes:
        flags: what sets it apart.
        tuned_as: the arm of the search `Plan.tuned_in` whose best trial it takes over.
        trials: the settings that a search tries, one run each.
        trials_at: other settings at some sizes.
        preset: flags of a search's arm at a real model's size, which has the paper's settings and is not searched.
        length: share of the plan's tokens that it trains on, with a learning-rate schedule that ends there.
    """

    name: str
    flags: Flags = field(default_factory=dict)
    tuned_as: str = ""
    trials: Sequence[Flags] = ()
    trials_at: Mapping[str, Sequence[Flags]] = field(default_factory=dict)
    preset: Flags = field(default_factory=dict)
    length: float = 1.0

    def trials_of(self, size: int | str) -> Sequence[Flags]:
        return self.trials_at.get(str(size), self.trials)


@dataclass(frozen=True)
class Claim:
    """A sentence that runs may refute: `metric` of `arm` is lower (higher, other) than `times` that of `than`."""

    says: str
    arm: str
    than: str
    metric: str = "validation_loss"
    sign: str = "lower"
    times: float = 1.0
    headline: bool = False


@dataclass(frozen=True)
class Plan:
    """One experiment.

    Attributes:
        sizes: widths of the small family (see `flags_of_width`), or presets of launch/models such as "tiny" and "350m".
        tokens_per_parameter: training tokens for each parameter outside the embeddings, one or several lengths.
        seeds: number of seeds, or the number at each size.
        tuned_in: the search whose best trials the arms take over.
        data: "large", "builtin", or a folder with train, valid and tokenizer.model.
        steps: of a preset, where they are not the preset's own.
        source: the figure or table of the paper.
    """

    name: str
    question: str
    arms: Mapping[str, Arm]
    claims: Sequence[Claim] = ()
    family: str = "llama"
    sizes: Sequence[int | str] = (64,)
    tokens_per_parameter: Sequence[float] = (20,)
    seeds: int | Mapping[str, int] = 3
    tuned_in: str = ""
    data: str = "large"
    steps: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def seeds_at(self, size: int | str) -> int:
        return self.seeds if isinstance(self.seeds, int) else self.seeds[str(size)]

    @property
    def is_search(self) -> bool:
        return any(arm.trials for arm in self.arms.values())

    @property
    def is_about_time(self) -> bool:
        return bool(self.claims) and all(claim.metric == "seconds_per_step" for claim in self.claims)


def plan_names() -> list[str]:
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def read_plan(name: str) -> Plan:
    """Read a plan of research/plans by its name, or a YAML file by its path.

    Raises:
        ResearchError: it is not there, or not a plan.
    """
    import yaml

    path = Path(name) if name.endswith((".yaml", ".yml")) else PLANS / f"{name}.yaml"
    try:
        return plan_of(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ResearchError(
            f"there is no plan {name}: name a .yaml file, or one of {', '.join(plan_names())}"
        ) from None
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ResearchError(f"{path} is not a plan: {error}") from None


def plan_of(content: Mapping[str, Any]) -> Plan:
    """Make a plan of what a YAML or JSON file holds."""
    content = dict(content)
    arms = {}
    for name, entries in content.pop("arms").items():
        entries = {"flags": {}, "preset": {}, "trials": (), "trials_at": {}, **(entries or {})}
        for key in ("flags", "preset"):
            entries[key] = _flags(entries[key])
        entries["trials"] = _trials(entries["trials"])
        entries["trials_at"] = {str(size): _trials(own) for size, own in entries["trials_at"].items()}
        arms[name] = Arm(name, **entries)
    for key in ("sizes", "tokens_per_parameter"):
        if key in content and not isinstance(content[key], list):
            content[key] = [content[key]]
    for key in ("seeds", "steps"):
        if isinstance(content.get(key), Mapping):
            content[key] = {str(size): number for size, number in content[key].items()}
    claims = [Claim(**claim) for claim in content.pop("claims", None) or ()]
    plan = Plan(arms=arms, claims=claims, **content)
    if unknown := [name for claim in claims for name in (claim.arm, claim.than) if name not in arms]:
        raise ValueError(f"a claim names the arm {unknown[0]}, and the arms are {', '.join(arms)}")
    return plan


def _flags(content: Mapping[str, Any]) -> Flags:
    words = {name: f"{value:g}" if isinstance(value, float) else value for name, value in content.items()}
    return {name: "" if value is None else str(value) for name, value in words.items()}


def _trials(content: Any) -> list[Flags]:
    """Read a list of settings, or all combinations of a mapping from flags to lists of values."""
    if isinstance(content, Mapping):
        content = [dict(zip(content, values, strict=True)) for values in itertools.product(*content.values())]
    return [_flags(trial) for trial in content]


# The small family of models ------------------------------------------------------------------------------------------

SEQUENCE, BATCH = 256, 8


def _feed_forward(width: int) -> int:
    return -(-8 * width // 3 // 16) * 16


def parameters_of_width(width: int) -> int:
    """Count the parameters outside the embeddings: 4 (4 d^2 + 3 d f + 2 d) + d, with f = 8/3 d rounded up to 16."""
    return 4 * (4 * width**2 + 3 * width * _feed_forward(width) + 2 * width) + width


def flags_of_width(width: int) -> Flags:
    """Four layers of LLaMA with heads of 32, in steps of 2048 tokens."""
    return {
        "model": "tiny", "num-layers": "4", "hidden-size": f"{width}", "ffn-hidden-size": f"{_feed_forward(width)}",
        "num-attention-heads": f"{width // 32}", "seq-length": f"{SEQUENCE}", "global-batch-size": f"{BATCH}",
    }  # fmt: skip


def preset(family: str, name: str) -> Flags:
    """Read the flags of a preset in launch/models."""
    lines = (ROOT / "launch" / "models" / f"{family}-{name}.args").read_text(encoding="utf-8").splitlines()
    words = (line.partition("#")[0].split() for line in lines)
    return {word[0].removeprefix("--"): " ".join(word[1:]) for word in words if word}


def is_real(size: int | str) -> bool:
    """Return whether a size is a preset with the paper's settings."""
    return isinstance(size, str) and size != "tiny"


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training: the flags of launch/pretrain_<family>.sh, sorted by name, and the digest of its data."""

    family: str
    flags: tuple[tuple[str, str], ...]
    data: str

    def value(self, name: str) -> str:
        own = dict(self.flags)
        return own[name] if name in own else preset(self.family, own["model"])[name]

    @property
    def steps(self) -> int:
        return int(self.value("train-iters"))

    @property
    def step_tokens(self) -> int:
        return int(self.value("global-batch-size")) * int(self.value("seq-length"))

    @property
    def words(self) -> str:
        return " ".join(f"--{name} {value}".rstrip() for name, value in self.flags)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.family, self.flags, self.data]).encode()).hexdigest()

    @property
    def name(self) -> str:
        own = dict(self.flags)
        return f"{own.get('hidden-size', own['model'])}-seed{own['seed']}-{self.steps}-{self.digest[:12]}"


@dataclass(frozen=True)
class Entry:
    """A run in its place in an experiment; `trial` counts from 1, and is 0 where nothing is searched."""

    arm: str
    size: int | str
    tokens_per_parameter: float
    seed: int
    trial: int
    run: Run


def entries_of(plan: Plan, data: str, settings: Settings, *, quick: bool = False) -> list[Entry]:
    """List the runs of a plan, seed by seed, its arms in turns: what is worth most if time runs out comes first.

    Args:
        data: digest of the data set.
        settings: the best trials of the plan's search.
        quick: two seeds at the first size, six steps each, to see that every arm runs.
    """
    first = 101 if plan.is_search else 1  # settings are chosen on other seeds than those they are judged by
    entries = []
    for size, length in itertools.islice(
        itertools.product(plan.sizes, plan.tokens_per_parameter), 1 if quick else None
    ):
        for seed in range(first, first + plan.seeds_at(size))[: 2 if quick else None]:
            arms = list(plan.arms.values())
            turn = seed % len(arms) if plan.is_about_time else 0  # a machine that warms up is fair to all
            for trial, arm in itertools.product(range(max(1, len(arms[0].trials_of(size)))), arms[turn:] + arms[:turn]):
                trials, tuned = arm.trials_of(size), settings(arm.tuned_as, size) if arm.tuned_as else {}
                own = {**tuned, **arm.flags, **(trials[trial] if trials else {}), "seed": str(seed)}
                run = _run_of(plan, size, length * arm.length, own, data, quick=quick)
                entries.append(Entry(arm.name, size, length, seed, trial + 1 if trials else 0, run))
    return entries


def _run_of(plan: Plan, size: int | str, length: float, own: Flags, data: str, *, quick: bool) -> Run:
    if isinstance(size, int):
        flags, steps = flags_of_width(size), max(2, round(parameters_of_width(size) * length / SEQUENCE / BATCH))
    else:
        whole = plan.steps.get(size) or int(preset(plan.family, size)["train-iters"])
        flags, steps = {"model": size}, max(2, round(whole * length / plan.tokens_per_parameter[0]))
    steps = 6 if quick else steps
    if not is_real(size):
        flags["lr-warmup-iters"] = str(max(1, round(0.05 * steps)))
    flags |= own | {
        "train-iters": str(steps),
        "log-interval": str(max(1, steps // 50)),
        "eval-interval": str(steps + 1),  # once, after the last step
        "log-timers-to-tensorboard": "",
    }
    if quick:  # else longer than these few steps, or a share of them that is no step
        short = {"lr-warmup-iters": "1", "simreg-start-iter": "3", "simreg-off-after": "0.5"}
        flags |= {name: value for name, value in short.items() if name in flags}
    if plan.is_about_time or quick:
        flags["eval-iters"] = "1"
    if "lr" in own:
        flags["min-lr"] = f"{0.1 * float(own['lr']):g}"
    if own.get("decoupled-lr", "").endswith("x"):  # a multiple of the arm's own rate
        rate = own.get("lr") or preset(plan.family, str(size))["lr"]
        flags["decoupled-lr"] = f"{float(own['decoupled-lr'][:-1]) * float(rate):g}"
        flags["decoupled-min-lr"] = f"{0.1 * float(flags['decoupled-lr']):g}"
    return Run(plan.family, tuple(sorted(flags.items())), data)
