# SPDX-License-Identifier: Apache-2.0
"""Read what a training run logged to TensorBoard: every scalar by step, and Megatron's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simreg_megatron.notices import SentenceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TRAIN_LOSS, VALIDATION_LOSS = "lm loss", "lm loss validation"
SIMREG_LOSS, NEGATIVE_COSINE = "simreg loss", "simreg negative cosine"
_TEXT = "/text_summary"  # what TensorBoard appends to the tags of texts


class ReportError(SentenceError):
    """A run is missing or unreadable."""


class Series(NamedTuple):
    """One scalar over a run: steps [n], rising, and values [n]."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """A run's name, its scalars by tag, and Megatron's arguments as text."""

    name: str
    scalars: dict[str, Series]
    settings: dict[str, str]

    def last(self, tag: str) -> float | None:
        """Return the value at the last step; None if the tag was never logged."""
        return float(self.scalars[tag].values[-1]) if tag in self.scalars else None

    def mean_of_end(self, tag: str) -> float | None:
        """Return the mean over the last tenth of the steps; None if the tag was never logged."""
        if tag not in self.scalars:
            return None
        steps, values = self.scalars[tag]
        return float(values[steps > 0.9 * steps[-1]].mean())


def read_run(folder: str | Path, name: str = "") -> Run:
    """Read a run.

    Args:
        folder: the --tensorboard-dir of a run, or its --output folder.
        name: the run's name in figures; by default the name of its output folder.

    Raises:
        ReportError: the folder holds no TensorBoard scalars.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    folder = Path(folder)
    inner = folder / "tensorboard" if (folder / "tensorboard").is_dir() else folder
    if not inner.is_dir():
        raise ReportError(f"{folder} is not a folder: give a run's --output folder or its --tensorboard-dir")
    try:
        events = EventAccumulator(str(inner), size_guidance={SCALARS: 0})  # 0 keeps every point
        events.Reload()
        tags = events.Tags()
        texts = {tag.removesuffix(_TEXT): events.Tensors(tag)[-1] for tag in tags["tensors"] if tag.endswith(_TEXT)}
        settings = {tag: b"".join(text.tensor_proto.string_val).decode() for tag, text in texts.items()}
        logged = {tag: events.Scalars(tag) for tag in tags["scalars"] if not tag.endswith(" vs samples")}
        scalars = _by_step(logged, _has_test_set(settings))
    except Exception as error:  # a damaged record may raise any type in TensorBoard
        raise ReportError(f"{inner} holds a damaged TensorBoard file ({type(error).__name__}: {error})") from None
    if not scalars:
        files = sorted(inner.glob("**/events.out.tfevents.*"))
        below = dict.fromkeys(str(path.parent).removesuffix("/tensorboard") for path in files if path.parent != inner)
        hint = f"give {' or '.join([*below][:3])}" if below else "the run has logged nothing yet, or elsewhere"
        raise ReportError(f"{inner} holds no TensorBoard scalars: {hint}")
    of_sets = [tag for tag in scalars if tag.startswith("lm loss validation-") and not tag.endswith(" ppl")]
    if of_sets:  # of several validation sets the first one is shown
        scalars.setdefault(VALIDATION_LOSS, scalars[of_sets[0]])
    own = inner.resolve()
    return Run(name or (own.parent if own.name == "tensorboard" else own).name, scalars, settings)


def _has_test_set(settings: Mapping[str, str]) -> bool:
    """Return whether Megatron evaluates a test set at the end of the run."""
    shares = re.findall(r"[\d.]+", settings.get("split", "")) if settings.get("data_path", "None") != "None" else []
    return settings.get("test_data_path", "None") != "None" or any(map(float, shares[2:]))


def _by_step(events: Mapping[str, Iterable[Any]], has_test_set: bool) -> dict[str, Series]:
    """Keep one value a step, the last; and none of what a run logged before it was resumed from an earlier step.

    Megatron logs the loss of a test set at the end, under the tag and step of the validation loss: it is left out.
    """
    import numpy as np

    in_order = {tag: sorted(of_tag, key=lambda event: event.wall_time) for tag, of_tag in events.items()}
    logged = pairwise(in_order.get(TRAIN_LOSS, ()))
    restarts = [(after.wall_time, after.step) for before, after in logged if after.step <= before.step]
    found = {}
    for tag, of_tag in in_order.items():
        if has_test_set and "validation" in tag and of_tag[-1].step in [event.step for event in of_tag[-2:-1]]:
            of_tag = of_tag[:-1]
        left = {
            event.step: event.value
            for event in of_tag
            if not any(event.wall_time < time and event.step >= step for time, step in restarts)
        }
        if left:
            steps, values = zip(*sorted(left.items()), strict=True)
            found[tag] = Series(np.array(steps), np.array(values, dtype=np.float64))
    return found
