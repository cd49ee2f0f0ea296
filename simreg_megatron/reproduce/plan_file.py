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
from simreg_megatron.reproduce.plan import Arm, Claim, Flags, Plan
from simreg_megatron.reproduce.plan_checks import MOST_RUNS, is_number, refuse_unfair
from simreg_megatron.sentences import brief

PLANS = Path(__file__).resolve().parent / "plans"
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")
_FLAG = re.compile(r"[A-Za-z0-9][\w-]*")

# What the program sets itself, or what makes runs comparable: size, text, length and schedule, what is read and when.
_SAME_IN_ALL_ARMS = {
    "model", "hidden-size", "ffn", "ffn-hidden-size", "num-layers", "num-attention-heads", "seq-length",
    "global-batch-size", "rampup-batch-size", "train-iters", "train-samples", "exit-interval", "exit-duration-in-mins",
    "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction", "min-lr",
    "decoupled-min-lr", "seed", "data", "valid-data", "tokenizer", "tokenizer-type", "tokenizer-model", "data-path",
    "train-data-path", "valid-data-path", "data-args-path", "per-split-data-args-path", "mock-data", "split",
    "data-cache-path", "output", "save", "load", "tensorboard-dir", "auto-resume", "save-interval", "eval-iters",
    "eval-interval", "full-validation", "log-interval", "log-timers-to-tensorboard", "lr-decay-style",
    "lr-wsd-decay-style", "lr-wsd-decay-iters", "lr-wsd-decay-samples", "step-batch-size-schedule", "kv-channels",
    "num-query-groups", "num-experts", "mtp-num-layers", "vocab-size", "padded-vocab-size", "eod-mask-loss",
    "pretrained-checkpoint", "iterations-to-skip", "skip-samples", "skip-train", "dry-run", "help", "h",
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
    if path.suffix in (".yaml", ".yml") and not path.is_file():
        raise ReproduceError(f"{path} is not there: name a plan's file, or one of {', '.join(plan_names())}")
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
    refuse_unfair(plan, where)
    return plan


def _read_yaml(path: Path) -> Any:
    """Data alone, and as much as the file has letters: aliases to lists of aliases could stand for a million values."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ReproduceError(f"{path} has an alias (*NAME), which no plan needs: write out what it stands for")
        _refuse_double_keys(yaml.compose(text, Loader=yaml.SafeLoader), path)
        return yaml.safe_load(text)
    except ReproduceError:
        raise
    except Exception as error:  # its own, and any that a malformed number or date causes in its constructors
        raise ReproduceError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None


def _refuse_double_keys(node: Any, path: Path) -> None:
    """Of two equal keys YAML takes the last."""
    seen = set()
    for child in node.value if isinstance(getattr(node, "value", None), list) else ():
        key, *values = child if isinstance(child, tuple) else (None, child)
        if key is not None and key.value in seen:
            raise ReproduceError(
                f"{path}: {brief(key.value)} stands twice (line {key.start_mark.line + 1}): write it once"
            )
        if key is not None and isinstance(key.value, str):
            seen.add(key.value)
        for value in values:
            _refuse_double_keys(value, path)


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
    if isinstance(content, Mapping) and "name" in content:
        raise ReproduceError(f"{where}: an arm's name is what stands before it ({brief(name)}): leave out its key name")
    entries = _known({"name": name, **content} if isinstance(content, Mapping) else content, Arm, f"{where}: {name}")
    for own in ("flags", "preset"):
        entries[own] = _flags(entries.get(own) or {}, f"{where}: {own} of {name}")
    entries["trials"] = _trials(entries.get("trials") or (), f"{where}: trials of {name}")
    at = entries.get("trials_at") or {}
    if not isinstance(at, Mapping):
        raise ReproduceError(f"{where}: trials_at of {name} is a mapping, each size with its trials")
    entries["trials_at"] = {str(size): _trials(own, f"{where}: trials of {name} at {size}") for size, own in at.items()}
    arm = Arm(**entries)
    if not isinstance(arm.name, str) or not isinstance(arm.tuned_as, str) or not is_number(arm.length):
        raise ReproduceError(
            f"{where}: {name} needs a name and a tuned_as that are words, and a length that is a number"
        )
    if not _ARM_NAME.fullmatch(arm.name):
        raise ReproduceError(f"{where}: an arm's name is of letters, digits, and . + - _, not {brief(arm.name)}")
    return arm


def _claim(content: Any, where: str) -> Claim:
    claim = Claim(**{"says": "", "arm": "", "than": "", **_known(content, Claim, f"{where}: claims")})
    words = (claim.says, claim.arm, claim.than, claim.metric, claim.sign)
    if not all(isinstance(word, str) and word for word in words) or not is_number(claim.times):
        raise ReproduceError(f"{where}: a claim has words as says, arm, than, metric and sign, and a number as times")
    if not isinstance(claim.headline, bool):
        raise ReproduceError(f"{where}: the headline of the claim {claim.says!r} is true or false, without quotes")
    return claim


def _list(content: Any, where: str) -> list[Any]:
    if content is not None and not isinstance(content, list):
        raise ReproduceError(f"{where}: expected a list")
    return content or []


def _flags(content: Any, where: str) -> Flags:
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str)
        and _FLAG.fullmatch(name)
        and isinstance(value, str | int | float | None)
        and _is_one_word(value)
        for name, value in content.items()
    ):
        raise ReproduceError(
            f"{where}: give each flag, without its dashes, one word or number, and a flag that stands alone nothing"
        )
    if fixed := sorted(_SAME_IN_ALL_ARMS & set(content)):
        raise ReproduceError(
            f"{where} may not set {fixed[0]}, which is decided for all arms alike: leave it out (sizes, steps, "
            "tokens_per_parameter, length, seeds and data decide)"
        )
    for name in set(content) & {"lr", "decoupled-lr"}:
        rate = str(content[name]).removesuffix("x" if name == "decoupled-lr" else "")
        if not _is_positive(rate):
            raise ReproduceError(f"{where}: {name} is a number above 0, not {brief(content[name])}")
    return {name: "" if value is None else _word(value) for name, value in content.items()}


def _is_one_word(value: Any) -> bool:
    """A flag that stands alone has no value at all, so true and false are none."""
    if isinstance(value, str):
        return not value.startswith("--") and not re.search(r"\s", value)
    return value is None or is_number(value)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _trials(content: Any, where: str) -> tuple[Flags, ...]:
    """A list of settings as it stands; a mapping of flags to lists of values stands for all combinations."""
    if isinstance(content, Mapping):
        if not all(isinstance(values, list) and values for values in content.values()):
            raise ReproduceError(f"{where}: give each flag a list of values")
        if math.prod(map(len, content.values())) > MOST_RUNS:
            raise ReproduceError(f"{where}: its lists make more than {MOST_RUNS:,} combinations: give shorter ones")
        found = itertools.product(*content.values())
        return tuple(_flags(dict(zip(content, values, strict=True)), where) for values in found)
    return tuple(
        _flags(trial, where) for trial in _list(list(content) if isinstance(content, tuple) else content, where)
    )
