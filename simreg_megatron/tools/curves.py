# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron curves`: compare training runs, as TensorBoard logged them, in one figure and one table."""

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.notices import SentenceError

TRAIN_LOSS, VALIDATION_LOSS = "lm loss", "lm loss validation"
SIMREG_LOSS, NEGATIVE_COSINE = "simreg loss", "simreg negative cosine"
PANELS = {  # tag: title, axis
    VALIDATION_LOSS: ("Validation loss", "nats per token; lower is better"),
    TRAIN_LOSS: ("Training loss, SimReg's term left out", "nats per token; lower is better"),
    SIMREG_LOSS: ("SimReg loss", "nats per token (log); lower is better"),
    NEGATIVE_COSINE: ("Mean cosine, different next tokens", "cosine, -1 to 1"),
}


class ReportError(SentenceError):
    """A run is missing or has logged nothing."""


class Series(NamedTuple):
    """One scalar over a run, as numpy arrays."""

    steps: Any  # int64 [n], rising
    values: Any  # float64 [n]


class Run(NamedTuple):
    """A run's name, and its scalars by tag; numbers of a tag that was never logged are None."""

    name: str
    scalars: dict[str, Series]

    def last(self, tag: str) -> float | None:
        return float(self.scalars[tag].values[-1]) if tag in self.scalars else None

    def mean_of_end(self, tag: str) -> float | None:
        """Return the mean over the last tenth of the steps."""
        if tag not in self.scalars:
            return None
        steps, values = self.scalars[tag]
        return float(values[steps > 0.9 * steps[-1]].mean())


def read_run(folder: str | Path, name: str = "") -> Run:
    """Read a run from its --tensorboard-dir or --output folder, whose name it has unless another is given.

    Of a step that was logged twice the last value counts; what was logged after the step of a resume is left out.
    """
    import numpy as np
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    run_folder = Path(folder).resolve()
    run_folder = run_folder.parent if run_folder.name == "tensorboard" else run_folder
    inner = run_folder / "tensorboard" if (run_folder / "tensorboard").is_dir() else Path(folder)
    events = EventAccumulator(str(inner), size_guidance={SCALARS: 0})  # 0 keeps every point
    if inner.is_dir():
        events.Reload()
    in_order = {tag: sorted(events.Scalars(tag), key=lambda each: each.wall_time) for tag in events.Tags()["scalars"]}
    if not in_order:
        raise ReportError(f"{inner} holds no TensorBoard scalars: give a run's --output folder or --tensorboard-dir")
    steps_logged = pairwise(in_order.get(TRAIN_LOSS, ()))
    restarts = [(after.wall_time, after.step) for before, after in steps_logged if after.step <= before.step]
    scalars = {}
    for tag, logged in in_order.items():
        if tag == VALIDATION_LOSS and logged[-1].step in [one.step for one in logged[-2:-1]] and _has_test_set(events):
            del logged[-1]  # Megatron logs the loss of the test set under the tag and step of the validation loss
        for time, step in restarts:
            logged = [one for one in logged if one.wall_time >= time or one.step < step]
        if points := sorted({one.step: one.value for one in logged}.items()):
            steps, values = zip(*points, strict=True)
            scalars[tag] = Series(np.array(steps), np.array(values, dtype=np.float64))
    return Run(name or run_folder.name, scalars)


def _has_test_set(events: Any) -> bool:
    """Return whether Megatron's arguments, which it logs as texts, name a text for tests or leave a share to it."""
    names = [tag for tag in events.Tags()["tensors"] if tag.startswith(("split/", "data_path/", "test_data_path/"))]
    given = {tag.partition("/")[0]: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in names}
    shares = re.findall(r"[\d.]+", given.get("split", "")) if given.get("data_path", "None") != "None" else []
    return given.get("test_data_path", "None") != "None" or any(map(float, shares[2:]))


def add_command(commands: Any) -> None:
    text = "compare training runs: a figure of their curves, and their last losses"
    parser = commands.add_parser("curves", help=text, description=text)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's --output folder or --tensorboard-dir, PATH or "
        "NAME=PATH; the first is the baseline")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="the figure (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    words = [(word, "", "") if Path(word).is_dir() else word.partition("=") for word in options.runs]
    runs = [read_run(path, name) if path else read_run(name) for name, _, path in words]
    if len({one.name for one in runs}) < len(runs):
        raise ReportError(f"two of the runs have one name ({', '.join(one.name for one in runs)}): give NAME=PATH")
    try:
        draw_curves(runs).savefig(options.output)
    except ValueError as error:  # of matplotlib: another ending
        raise ReportError(f"--output {options.output}: {error}") from None
    print(*table_of(runs), f"Figure: {options.output}", sep="\n")


def table_of(runs: Sequence[Run]) -> Iterator[str]:
    """Yield lines of text: where each run ended, and the difference from the first."""
    width = max(len(run.name) for run in runs)
    yield f"{'run':{width}}  {'step':>8}  {'validation loss':>15}  {'difference':>10}"
    first = runs[0].last(VALIDATION_LOSS)
    for run in runs:
        if (loss := run.last(VALIDATION_LOSS)) is None:
            yield f"{run.name:{width}}  no validation loss was logged"
            continue
        difference = "" if run is runs[0] or first is None else f"{loss - first:+.4f}"
        yield f"{run.name:{width}}  {run.scalars[VALIDATION_LOSS].steps[-1]:8}  {loss:15.4f}  {difference:>10}"


def draw_curves(runs: Sequence[Run], *, title: str = "") -> Any:
    """Draw the losses and cosines of several runs into a matplotlib Figure, and label each with its last value."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=160, layout="constrained")
    lines: dict[str, Any] = {}
    for axes, (tag, (name, unit)) in zip(figure.subplots(2, 2).ravel(), PANELS.items(), strict=True):
        axes.set(xlabel="training step", ylabel=unit)
        axes.set_title(name, fontsize=11, loc="left")
        axes.grid(color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        drawn = [(place, run) for place, run in enumerate(runs) if tag in run.scalars]
        ends: list[Any] = [run.last(tag) if tag == VALIDATION_LOSS else run.mean_of_end(tag) for _, run in drawn]
        for (place, run), end in zip(drawn, ends, strict=True):
            steps, values = run.scalars[tag]
            if len(values) > 100:  # pale, with their running mean on top
                axes.plot(steps, values, color=f"C{place}", alpha=0.2, linewidth=0.8)
                window = len(values) // 20
                steps, values = steps[window - 1 :], np.convolve(values, np.full(window, 1 / window), "valid")
            (lines[run.name],) = axes.plot(steps, values, color=f"C{place}", linewidth=1.8)
            where, side = (steps[-1], values[-1]), "bottom" if end == max(ends) else "top"  # so that two stay apart
            axes.annotate(f"{end:.4g}", where, (4, 0), textcoords="offset points", color=f"C{place}", va=side)
        if tag == SIMREG_LOSS:
            axes.set_yscale("log", nonpositive="mask")
        elif tag == TRAIN_LOSS and drawn:  # leave out the start, where a loss falls steeply
            axes.set_ylim(top=np.nanquantile(np.concatenate([run.scalars[tag].values for _, run in drawn]), 0.95))
    figure.legend(list(lines.values()), list(lines), title=title, loc="outside upper center", ncols=4, frameon=False)
    return figure
