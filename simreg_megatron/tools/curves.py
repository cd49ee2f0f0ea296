# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron curves`: compare training runs, as TensorBoard logged them, in one figure and one table."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simreg_megatron.notices import SentenceError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

TRAIN_LOSS, VALIDATION_LOSS = "lm loss", "lm loss validation"
SIMREG_LOSS, NEGATIVE_COSINE = "simreg loss", "simreg negative cosine"
_TEXT = "/text_summary"  # what TensorBoard appends to the tags of texts
# Okabe and Ito's palette, which readers with colour blindness can tell apart; dashes help in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
PANELS = {  # tag: title, axis
    VALIDATION_LOSS: ("Validation loss", "nats per token; lower is better"),
    TRAIN_LOSS: ("Training loss, SimReg's term left out", "nats per token; lower is better"),
    SIMREG_LOSS: ("SimReg loss", "nats per token (log); lower is better"),
    NEGATIVE_COSINE: ("Mean cosine, different next tokens", "cosine, -1 to 1"),
}
_SMOOTHED_POINTS = 100  # longer curves are drawn pale, with their running mean on top
_PLACES = {  # these arguments say nothing of what was trained
    "save", "load", "save_interval", "tensorboard_dir", "data_cache_path", "wandb_project", "wandb_exp_name",
    "wandb_save_dir", "rank", "local_rank", "iteration", "curr_iteration", "consumed_train_samples",
    "consumed_valid_samples", "num_floating_point_operations_so_far", "exit_interval", "exit_on_missing_checkpoint",
}  # fmt: skip
_OTHER_SAMPLES = " (so the last evaluations read other samples: each goes on where the one before ended)"
_OF_EVALUATION = {"eval_interval", "eval_iters", "global_batch_size", "seq_length", "train_iters"}


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
    """Read a run from its --tensorboard-dir or its --output folder, whose name it has unless another is given."""
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
        scalars = _by_step(logged, settings)
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


def _by_step(events: Mapping[str, Iterable[Any]], settings: Mapping[str, str]) -> dict[str, Series]:
    """Keep one value a step, the last; and none of what a run logged before it was resumed from an earlier step.

    Megatron logs the loss of a test set at the end, under the tag and step of the validation loss: it is left out.
    """
    import numpy as np

    shares = re.findall(r"[\d.]+", settings.get("split", "")) if settings.get("data_path", "None") != "None" else []
    has_test_set = settings.get("test_data_path", "None") != "None" or any(map(float, shares[2:]))
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


def add_command(commands: Any) -> None:
    """Add `curves` to the subparsers of the command line."""
    text = "compare training runs: a figure of their curves, their last losses, the settings that differ"
    parser = commands.add_parser("curves", help=text, description=text)
    text = "a run's --output folder or --tensorboard-dir, PATH or NAME=PATH; the first is the baseline"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=text)
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="the figure (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the figure and print the table."""
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if options.output.suffix[1:].lower() not in known:
        raise ReportError(f"--output {options.output} must end in .png or another of {', '.join(known)}")
    runs = []
    for word in options.runs:
        name, _, path = word.partition("=")
        runs.append(read_run(word) if not path or Path(word).exists() else read_run(path, name))
    if len({one.name for one in runs}) < len(runs):
        raise ReportError(f"two of the runs have one name ({', '.join(one.name for one in runs)}): give NAME=PATH")
    draw_curves(runs).savefig(options.output)
    print(*table_of(runs), sep="\n")
    print(f"Figure: {options.output}")


def table_of(runs: Sequence[Run]) -> Iterator[str]:
    """Lines of text: where each run ended, the difference from the first, and Megatron's arguments that differ."""
    width = max(len(run.name) for run in runs)
    yield f"{'run':{width}}  {'step':>8}  {'validation loss':>15}  {'difference':>10}"
    first = runs[0].last(VALIDATION_LOSS)
    for run in runs:
        loss = run.last(VALIDATION_LOSS)
        if loss is None:
            yield f"{run.name:{width}}  no validation loss was logged"
            continue
        apart = "" if run is runs[0] or first is None else f"{loss - first:+.4f}"
        yield f"{run.name:{width}}  {run.scalars[VALIDATION_LOSS].steps[-1]:8}  {loss:15.4f}  {apart:>10}"
    for name in sorted(set().union(*(run.settings for run in runs)) - _PLACES):
        values = [run.settings.get(name, "None").replace("None", "not given") for run in runs]
        if len(set(values)) > 1:
            found = ", ".join(f"{run.name} {value}" for run, value in zip(runs, values, strict=True))
            yield f"{name}: {found}{_OTHER_SAMPLES if name in _OF_EVALUATION else ''}"


def draw_curves(runs: Sequence[Run], *, title: str = "") -> Figure:
    """Draw the losses and cosines of several runs over the training steps, and label each with its last value."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=160, layout="constrained")
    lines: dict[str, Any] = {}
    for axes, (tag, (name, unit)) in zip(figure.subplots(2, 2).ravel(), PANELS.items(), strict=True):
        axes.set(xlabel="training step", ylabel=unit)
        axes.set_title(name, fontsize=11, loc="left")
        plain_axes(axes)
        drawn = [(place, run) for place, run in enumerate(runs) if tag in run.scalars]
        ends: list[Any] = [run.last(tag) if tag == VALIDATION_LOSS else run.mean_of_end(tag) for _, run in drawn]
        for (place, run), end in zip(drawn, ends, strict=True):
            side = "bottom" if end == max(ends) else "top"  # of the label, so that two stay apart
            _draw(axes, run.scalars[tag], run.name, place, (end, side), smooths=tag != VALIDATION_LOSS)
        if not drawn:
            axes.text(0.5, 0.5, f'"{tag}" was not logged', transform=axes.transAxes, ha="center", color="0.4")
        elif tag == SIMREG_LOSS:
            axes.set_yscale("log", nonpositive="mask")
        elif tag == TRAIN_LOSS:  # leave out the start, where a loss falls steeply
            values = np.concatenate([run.scalars[tag].values for _, run in drawn])
            axes.set_ylim(top=np.quantile(values[np.isfinite(values)], 0.95) if np.isfinite(values).any() else None)
        handles, labels = axes.get_legend_handles_labels()
        lines |= zip(labels, handles, strict=True)
    figure.legend(list(lines.values()), list(lines), title=title, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _draw(axes: Axes, series: Series, name: str, place: int, end: tuple[Any, str], *, smooths: bool) -> None:
    """Draw a line, and at its end the value that tables have: the last one, or the mean over the last tenth."""
    import numpy as np

    steps, values = series
    colour, label = COLOURS[place % len(COLOURS)], name.replace("$", r"\$").lstrip("_")
    if smooths and len(values) > _SMOOTHED_POINTS:
        axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
        window = len(values) // 20
        steps, values = steps[window - 1 :], np.convolve(values, np.full(window, 1 / window), "valid")
    axes.plot(steps, values, DASHES[place % len(DASHES)], color=colour, label=label, linewidth=1.8)
    text, where = f"{end[0]:.4g}", (steps[-1], values[-1])
    axes.annotate(text, where, (4, 0), textcoords="offset points", color=colour, fontsize=8, va=end[1])


def plain_axes(axes: Axes) -> None:
    """Leave out the frame, and draw a pale grid behind the lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
