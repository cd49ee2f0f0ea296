# SPDX-License-Identifier: Apache-2.0
"""Judge whether a run that was struck lost no more than it may: from its logs, and its last checkpoint bit by bit."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tests.faults.layouts import STEPS
from tests.helpers import stored

ROUNDING = 2e-3
"""How far the weights may be from the undisturbed run's, relative to their norm, where the layout was changed.

Nearly all are some 1e-6 apart. But Adam's first steps for an element go by the sign of its gradient, not its size:
where that is as small as its rounding, the element ends up to a few learning rates away. One of 32,768 did so in
one run and made 3.6e-4 of its matrix; this is room for thirty.
"""

_STEP = re.compile(r"\[(\S+ [\d:.]+)\d*\] iteration +(\d+)/")
_SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+) ")
_RESUMED = re.compile(r"^> resuming from iteration (\d+) ", re.MULTILINE)
_OURS = re.compile(r"^(?:error: .*|Stopped.*|> .* starts from scratch)$", re.MULTILINE)
_OTHERS = re.compile(
    r"^(?:\[rank\d+\]: *)?(?:[\w.]+(?:Error|Exception)\b.*|KeyboardInterrupt"
    r"|\w+:megatron\.core\.rerun_state_machine:Exiting now.*)$",
    re.MULTILINE,
)
_DONE = re.compile(rf"^> .*: {STEPS} iterations are done, so there is nothing to do$", re.MULTILINE)
_IN_USE = "is in use by another run"


@dataclass(frozen=True)
class StartLog:
    began: float
    status: int
    reached: int | None  # the last step that ended
    saved: int | None  # the newest checkpoint that Megatron calls saved
    resumed: int | None
    said: str
    first_step: float | None  # the clock's time when its first step ended
    refused: bool  # another run, or what is left of one, holds the folder


def read_log(log: str, *, began: float, status: int) -> StartLog:
    steps, saved, resumed = _STEP.findall(log), _SAVED.findall(log), _RESUMED.findall(log)
    first = datetime.fromisoformat(steps[0][0][:26]).timestamp() if steps else None
    return StartLog(
        began=began,
        status=status,
        reached=int(steps[-1][1]) if steps else None,
        saved=max(map(int, saved)) if saved else None,
        resumed=int(resumed[-1]) if resumed else STEPS if _DONE.search(log) else None,
        said=_sentence(log) if status else "",
        first_step=first,
        refused=_IN_USE in log,
    )


def _sentence(log: str) -> str:
    """The last of ours; else the first of an error's, which the other ranks' follow."""
    ours, others = _OURS.findall(log), _OTHERS.findall(log)
    sentence = (ours[-1:] or others or [""])[0].strip()[:300]
    return sentence.encode("ascii", "ignore").decode().strip()  # gloo ends its sentence with a picture


@dataclass(frozen=True)
class Loss:
    """Over all starts: where the run was, where it went on, and what is wrong with that."""

    reached: int
    saved: int
    resumed: int
    lost: int
    wrong: tuple[str, ...]


def losses(starts: Sequence[StartLog]) -> Loss:
    """The loss of the worst restart, and every restart that lost more than the steps since the last whole save."""
    saved = 0
    worst = Loss(0, 0, 0, -1, ())
    wrong: list[str] = []
    trained = [start for start in starts if not start.refused]
    for before, after in pairwise(trained):
        reached = before.reached or before.resumed or 0
        saved = max(saved, before.saved or 0)
        resumed = after.resumed if after.resumed is not None else 0
        if after.status and after.resumed is None and after.reached is None:
            continue  # it was struck before it could say
        if resumed < saved:
            what = "starts at step 0" if resumed == 0 else f"goes on at step {resumed}"
            wrong.append(f"{what} although the checkpoint of step {saved} was saved")
        if max(0, reached - resumed) > worst.lost:
            worst = Loss(reached, saved, resumed, max(0, reached - resumed), ())
    return replace(worst, lost=max(0, worst.lost), wrong=tuple(wrong))


def seconds_to_go_on(starts: Sequence[StartLog]) -> float:
    """From the beginning of the first start that got so far to the end of its first step; 0 where no step was left."""
    return next((start.first_step - start.began for start in starts if start.first_step), 0.0)


def newest(output: Path) -> Path:
    return output / "checkpoints" / f"iter_{STEPS:07d}"


def bits(checkpoint: Path) -> dict[str, str]:
    """A digest of every weight, our trained scalars among them, and of AdaGC's averages."""
    found = {name: _digest(tensor) for name, tensor in sorted(stored.tensors(checkpoint).items()) if _is_weight(name)}
    return {**found, "adagc": hashlib.sha256(json.dumps(_adagc(checkpoint)).encode()).hexdigest()}


def _is_weight(name: str) -> bool:
    return not name.startswith(("rng_state", "rerun_state", "common_state", "dataloader"))


def _adagc(checkpoint: Path) -> Any:
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    scheduler = load_common_state_dict(str(checkpoint)).get("opt_param_scheduler", {})
    return scheduler.get("simreg_adagc") if isinstance(scheduler, dict) else None


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(str((tuple(tensor.shape), tensor.dtype)).encode() + raw.numpy().tobytes()).hexdigest()


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def distance(one: Path, other: Path) -> float:
    """The largest difference of any weight, relative to the norm of that weight; infinite where names differ."""
    found = [stored.tensors(path) for path in (one, other)]
    names = [{name for name in tensors if _is_weight(name)} for tensors in found]
    if names[0] != names[1]:
        return float("inf")
    gaps = [_apart(found[0][name], found[1][name]) for name in names[0]]
    return max(gaps)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    gap = (one.double() - other.double()).norm().item() / max(one.double().norm().item(), 1e-12)
    return gap if gap == gap else float("inf")
