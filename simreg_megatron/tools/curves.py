# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron curves`: compare training runs in one figure and one table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.tools.events import (
    NEGATIVE_COSINE,
    SIMREG_LOSS,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    ReportError,
    Run,
    Series,
    read_run,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
