# SPDX-License-Identifier: Apache-2.0
"""A report of one's own runs: curves, where they ended, what was saved, margins and heat-maps, from what they left.

    saving = 1 - (tokens after which a run stays at or below the first's last validation loss) / (all of the first's)

Read in the middle of a longer schedule, whose decay was still to come, the saving is an underestimate of what a
schedule of that length would save; and of one run each it is one draw.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from simreg_megatron.report import runs
from simreg_megatron.report.arms import Arm
from simreg_megatron.report.curves import draw_curves, panels_of
from simreg_megatron.report.heatmap import HiddenStates, draw_heatmaps, excerpt, mean_cosines, read_hidden_states
from simreg_megatron.report.page import Grid, Page, Picture, Section
from simreg_megatron.report.runs import Run
from simreg_megatron.report.welch import welch

AUTHORS_SAVING = "convergence over 30 % faster (abstract)"
AUTHORS_TIME = "+0.0 % (7B, H800, Table 3)"
_AUTHORS_LOSS = "-0.055 nats (350M, perplexity 15.06 to 14.25, Table 7)"
_WHERE = ("path", "dir", "save", "load", "rank", "tensorboard", "seed", "timestamp", "wandb", "port")
"""Arguments whose names hold one of these say nothing of what was trained."""


_OF_THE_TEXT = ("data_path", "train_data_path", "valid_data_path", "tokenizer_model", "vocab_size", "padded_vocab_size")


def page_of(arms: Sequence[Arm], *, title: str = "SimReg: runs", further: Sequence[Section] = ()) -> Page:
    """The first arm is what the others are compared with."""
    sections = [_ends(arms), *further, *_states(arms), _settings(arms)]
    return Page(title, sections, [*_versions_of_runs(arms), *versions_here()])


def _ends(arms: Sequence[Arm]) -> Section:
    curves = [arm.curve for arm in arms]
    names = ", ".join(arm.name for arm in arms)
    figure = draw_curves(curves, None, panels=panels_of(curves))
    return Section(
        "curves",
        f"Which of {names} ended lower, and with how many tokens would it have reached the first one's loss?",
        verdicts=[_verdict(arm, arms[0]) for arm in arms[1:]],
        pictures=[
            Picture(
                "all",
                figure,
                "Each panel: one value over the training steps; beside each line its end, which for a curve that is "
                "smoothed is the mean of its last twentieth.",
            )
        ],
        grids=[_table_of_ends(arms), *([_table_of_savings(arms)] if len(arms) > 1 else [])],
    )


def _verdict(arm: Arm, first: Arm) -> str:
    return f"{_compared(arm, first)}{_unlike(arm, first)}"


def _unlike(arm: Arm, first: Arm) -> str:
    """What makes the two no fair pair, as further sentences."""
    told = ""
    here, there = (each.curve.scalars.get(runs.VALIDATION_LOSS) for each in (arm, first))
    if here is not None and there is not None and here.steps[-1] != there.steps[-1]:
        told += f" But {arm.name} was read at step {here.steps[-1]}, and {first.name} at step {there.steps[-1]}."
    told += "".join(map(_unlike_each_other, (first, arm)))
    settings = [each.runs[0].settings for each in (arm, first)]
    other = [name for name in _OF_THE_TEXT if len({each.get(name) for each in settings}) > 1 and all(settings)]
    if other:
        told += f" But their text is not the same by {', '.join(other)}."
    return told


def _unlike_each_other(arm: Arm) -> str:
    """What makes its runs more than seeds of one arm, as further sentences."""
    told = ""
    if len(arm.ends) > 1:
        told += f" But the runs of {arm.name} end at steps {' and '.join(map(str, arm.ends))}."
    if other := _differing([run.settings for run in arm.runs if run.settings]):
        told += f" But the runs of {arm.name} differ by {', '.join(other)}."
    return told


def _differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of Megatron's arguments that are not the same in all of them, and say what was trained."""
    names = sorted(set().union(*settings))
    return [
        name
        for name in names
        if len({each.get(name) for each in settings}) > 1 and not any(word in name for word in _WHERE)
    ]


def _compared(arm: Arm, first: Arm) -> str:
    pair = f"{arm.name} against {first.name}"
    if not arm.losses or not first.losses:
        return f"{pair}: cannot be compared, as no validation loss was logged."
    if diverged := " and ".join(filter(None, (first.diverged, arm.diverged))):
        return f"{pair}: cannot be compared, as {diverged} (no finite validation loss)."
    if seeds := _too_few(arm, first):
        apart = np.mean(arm.losses) - np.mean(first.losses)
        return f"{pair}: {apart:+.4f} nats per token, {seeds}: no interval, so nothing can be concluded."
    found = welch(arm.losses, first.losses)
    told = f"{found.difference:+.4f} nats per token ({found.low:+.4f} to {found.high:+.4f}, p {found.p_value:.2g})"
    if found.low > 0 or found.high < 0:
        return f"{pair}: {'lower' if found.high < 0 else 'higher'}, {told}."
    return f"{pair}: not told apart, {told}; {found.detectable:.4f} would be detected four times in five."


def _too_few(arm: Arm, first: Arm) -> str:
    """The seeds of both, where there is no interval; "" where there is."""
    here, there = len(arm.losses), len(first.losses)
    return "" if min(here, there) > 1 else "one seed each" if here == there else f"{here} and {there} seeds"


def _table_of_ends(arms: Sequence[Arm]) -> Grid:
    heads = ("run", "seeds", "step", "validation loss (nats per token)", "difference", "95 % interval", "the authors'")
    rows = []
    for arm in arms:
        loss = arm.diverged or (f"{np.mean(arm.losses):.4f}" if arm.losses else "not logged")
        row = [arm.name, str(len(arm.runs)), " and ".join(map(str, arm.ends)) or "-", loss]
        if arm is arms[0]:
            rows.append([*row, "", "", ""])
            continue
        apart = interval = "-"
        if arm.losses and arms[0].losses and not (arm.diverged or arms[0].diverged):
            apart = f"{np.mean(arm.losses) - np.mean(arms[0].losses):+.4f}"
            interval = _too_few(arm, arms[0])
            if not interval:
                found = welch(arm.losses, arms[0].losses)
                interval = f"{found.low:+.4f} to {found.high:+.4f}"
        rows.append([*row, apart, interval, _beside(arm, arms[0], _AUTHORS_LOSS)])
    return Grid(heads, rows, f"Where they ended; differences are from {arms[0].name}.")


def _beside(arm: Arm, first: Arm, told: str) -> str:
    """The authors' number, where the pair is theirs: SimReg, and nothing but cross-entropy."""
    return told if (arm.objective, first.objective) == ("simreg", "") else "-"


def _table_of_savings(arms: Sequence[Arm]) -> Grid:
    loss = None if arms[0].diverged else arms[0].curve.last(runs.VALIDATION_LOSS)
    rows = [_saving(arm, arms[0], loss) for arm in arms[1:]]
    says = (
        f"When each one reached the last validation loss of {arms[0].name}"
        f"{'' if loss is None else f' ({loss:.4f})'} for good: read in the middle of a longer schedule, so an "
        "underestimate of what a schedule of that length saves. Time is what the runs logged, which means nothing if "
        "they shared their cores."
    )
    heads = ("run", "at step", "tokens saved", "the authors'", "time of a step", "the authors'", "time saved")
    return Grid(heads, rows, says)


def _saving(arm: Arm, base: Arm, loss: float | None) -> list[str]:
    run, first = arm.curve, base.curve
    authors = [_beside(arm, base, told) for told in (AUTHORS_SAVING, AUTHORS_TIME)]
    slower = arm.seconds / base.seconds if arm.seconds and base.seconds else None
    time = "not logged" if slower is None else f"{100 * (slower - 1):+.1f} %"
    step = None if loss is None else step_at(run, loss)
    if step is None:
        return [arm.name, "-" if loss is None else "not reached", "-", authors[0], time, authors[1], "-"]
    if not (last := first.scalars[runs.VALIDATION_LOSS].steps[-1]):  # it was evaluated before its first step alone
        return [arm.name, f"{step:.0f}", "-", authors[0], time, authors[1], "-"]
    left = step / last
    in_time = "-" if slower is None else f"{100 * (1 - left * slower):.0f} %"
    if run.tokens_per_step and first.tokens_per_step:
        saved = f"{100 * (1 - left * run.tokens_per_step / first.tokens_per_step):.0f} %"
    else:
        saved = f"{100 * (1 - left):.0f} % of the steps"  # which may have had more or fewer tokens
    return [arm.name, f"{step:.0f}", saved, authors[0], time, authors[1], in_time]


def step_at(run: Run, loss: float) -> float | None:
    """Where the validation curve falls to `loss` for good, on the straight line between two evaluations.

    None where the run ends above `loss`: a noisy curve that once dipped below it has not arrived.
    """
    series = run.scalars.get(runs.VALIDATION_LOSS)
    if series is None or not series.values[-1] <= loss:
        return None
    above = np.flatnonzero(~(series.values <= loss))
    if not above.size:
        return float(series.steps[0])
    place = above[-1] + 1
    (one, other), (before, after) = series.steps[place - 1 : place + 1], series.values[place - 1 : place + 1]
    share = (before - loss) / (before - after) if np.isfinite(before) else 1.0
    return float(one + (other - one) * share)


def _states(arms: Sequence[Arm]) -> Iterator[Section]:
    """Heat-maps, where a probe left hidden states in the runs' folders."""
    by_step: dict[str, list[HiddenStates]] = {}
    for arm in arms:
        for path in sorted(arm.folders[0].glob("hidden*.npz"), key=_step_of) if arm.folders[0].is_dir() else ():
            name = f"{arm.name}, step {_step_of(path)}" if _step_of(path) else arm.name
            by_step.setdefault(path.stem, []).append(read_hidden_states(path, name=name))
    ordered = [states for stem in sorted(by_step, key=lambda stem: _step_of(Path(stem))) for states in by_step[stem]]
    if not ordered:
        return
    means = [(states.name, mean_cosines(excerpt(states))) for states in ordered]
    yield Section(
        "hidden states",
        "How alike are the hidden states of one text, where they stand for the same next token and where not?",
        pictures=[
            Picture(
                "cosines",
                draw_heatmaps(ordered, None, columns=min(len(arms), 3)),
                "Cosine of every two hidden states of a part of one validation text; framed: the same next token.",
            )
        ],
        grids=[
            Grid(
                ("model", "same next token", "another next token"),
                [(name, f"{found.same:.3f}", f"{found.other:.3f}") for name, found in means],
                "Mean cosine, -1 to 1, of the pairs in the figure. The authors': 0.488 with cross-entropy and 0.354 "
                "with SimReg over all pairs of another text (7B, Figure 7).",
            )
        ],
    )


def _step_of(path: Path) -> int:
    step = path.stem.rpartition("-")[2]
    return int(step) if step.isdecimal() else 0


def _settings(arms: Sequence[Arm]) -> Section:
    """What differs between the arms, and how each run was started."""
    settings = [arm.runs[0].settings for arm in arms]
    rows = [(name, *(each.get(name, "-") for each in settings)) for name in _differing(settings)]
    commands = [line for arm in arms for folder in arm.folders for line in _commands(arm.name, folder)]
    grids = [Grid(("setting", *(arm.name for arm in arms)), rows, "Megatron's arguments that differ.")] if rows else []
    return Section("settings", "What was run, and in what do the runs differ?", grids=grids, commands=commands)


def _commands(name: str, folder: Path) -> Iterator[str]:
    """From the records that the launcher keeps beside a run."""
    for path in sorted(folder.glob("record/*/command.txt")):
        try:
            told = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            told = f"{path} cannot be read ({error.strerror})"
        yield f"{name}, {path.parent.name}: {told}"


def _versions_of_runs(arms: Iterable[Arm]) -> list[str]:
    found: dict[str, list[str]] = {}
    for arm in arms:
        for folder in arm.folders:
            for path in sorted(folder.glob("record/*/versions.json")):
                found.setdefault(_versions_in(path), []).append(arm.name)
    return [f"{', '.join(dict.fromkeys(names))}: {line}" for line, names in found.items()]


def _versions_in(path: Path) -> str:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        packages = ", ".join(f"{name} {facts['packages'].get(name, '-')}" for name in _PACKAGES)
        return f"commit {facts['git'] or 'unknown'}, Python {facts['python'].split()[0]}, {packages}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{path} cannot be read"


_PACKAGES = ("torch", "megatron-core")


def versions_here() -> list[str]:
    """Of what made the page."""
    names = ("simreg-megatron", *_PACKAGES, "matplotlib", "numpy", "scipy")
    found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions() if dist.metadata["Name"] in names}
    told = ", ".join(f"{name} {found[name]}" for name in names if name in found)
    return [f"this page: Python {platform.python_version()}, {told}"]
