# SPDX-License-Identifier: Apache-2.0
"""From a plan to its runs. A run is known by its flags and its data alone, so experiments share the runs they share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import Arm, Flags, Plan
from simreg_megatron.reproduce.presets import is_real, preset
from simreg_megatron.reproduce.shapes import Shape, last_rate, schedule

Tuned = Callable[[str, int | str], Flags]
"""(arm of the search, size) to the flags of its best trial."""

_QUICK_STEPS = 6
_LOG_POINTS = 50
_FIRST_SEARCH_SEED = 101  # a setting is chosen on other seeds than those it is judged by


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        flags: of launch/pretrain_<family>.sh, sorted by name; where to read and where to write are not among them.
        data: digest of the data set.
    """

    family: str
    flags: tuple[tuple[str, str], ...]
    data: str

    def value(self, name: str) -> str | None:
        return dict(self.flags).get(name)

    @property
    def steps(self) -> int:
        return int(dict(self.flags)["train-iters"])

    @property
    def seed(self) -> int:
        return int(dict(self.flags)["seed"])

    @property
    def size(self) -> str:
        return self.value("hidden-size") or dict(self.flags)["model"]

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return int(self.value("global-batch-size") or self._preset["global-batch-size"])

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return int(self.value("seq-length") or self._preset["seq-length"])

    @property
    def _preset(self) -> Flags:
        return preset(self.family, dict(self.flags)["model"])

    @property
    def words(self) -> str:
        """Its flags as they are typed."""
        return " ".join(f"--{name} {value}".rstrip() for name, value in self.flags)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.family, self.flags, self.data]).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Of its folder: what a person looks for first, then what makes it unique."""
        return f"{self.size}-seed{self.seed}-{self.steps}-{self.digest[:12]}"


@dataclass(frozen=True)
class Entry:
    """A run in its place in an experiment.

    Attributes:
        trial: number of the setting that is tried, from 1; 0 where nothing is tried.
    """

    experiment: str
    arm: str
    size: int | str
    tokens_per_parameter: float
    seed: int
    trial: int
    run: Run


def entries_of(plan: Plan, dataset: Dataset, tuned: Tuned, *, quick: bool = False) -> list[Entry]:
    """All runs of a plan, in the order in which they are worth most if time runs out: seed by seed, arms in turns.

    Args:
        tuned: asked for the arms that take over a best trial.
        quick: a few steps of two seeds at the first size: does it run at all?
    """
    sizes, lengths, most_seeds = plan.sizes, plan.tokens_per_parameter, 1_000_000
    if quick:
        sizes, lengths, most_seeds = sizes[:1], lengths[:1], 2
    first = _FIRST_SEARCH_SEED if plan.is_search else 1
    return [
        Entry(plan.name, arm.name, size, ratio, seed, number, run)
        for size in sizes
        for ratio in lengths
        for seed in range(first, first + min(most_seeds, plan.seeds_at(size)))
        for number, arm, run in _in_turns(plan, size, ratio, seed, dataset, tuned, quick)
    ]


def _in_turns(
    plan: Plan, size: int | str, ratio: float, seed: int, dataset: Dataset, tuned: Tuned, quick: bool
) -> list[tuple[int, Arm, Run]]:
    found = []
    first = seed % len(plan.arms) if plan.is_about_time else 0  # a machine that warms up or cools down is fair to all
    for number in range(max(1, len(plan.arms[0].trials_of(size)))):
        for arm in plan.arms[first:] + plan.arms[:first]:
            own = dict(tuned(arm.tuned_as, size)) if arm.tuned_as else {}
            trials = arm.trials_of(size)
            own |= arm.flags | (trials[number] if trials else {})
            run = _run(plan, size, ratio * arm.length, {**own, "seed": str(seed)}, dataset, quick)
            found.append((number + 1 if trials else 0, arm, run))
    return found[:4] if quick and plan.is_search else found


def _run(plan: Plan, size: int | str, ratio: float, own: Flags, dataset: Dataset, quick: bool) -> Run:
    if isinstance(size, int):
        shape = Shape(size)
        flags, steps = shape.flags, shape.steps(ratio)
    else:
        share = ratio / plan.tokens_per_parameter[0]
        whole = plan.steps.get(size) or int(preset(plan.family, size)["train-iters"])
        flags, steps = {"model": size}, max(2, round(whole * share))
    steps = _QUICK_STEPS if quick else steps
    # A real preset's warm-up is the paper's, and the launcher shortens it where the run is shorter.
    length = {"train-iters": str(steps)} if is_real(size) else schedule(steps)
    flags = {**flags, **length, **own, **_watch(steps)}
    if plan.is_about_time:
        flags["eval-iters"] = "1"  # the whole validation text would take longer than the steps that are timed
    if "lr" in own:
        flags["min-lr"] = last_rate(own["lr"])
    if own.get("decoupled-lr", "").endswith("x"):
        rate = preset(plan.family, str(size)).get("lr") if is_real(size) else None
        flags["decoupled-lr"] = _multiple(own["decoupled-lr"], own.get("lr", rate), plan.name)
        flags["decoupled-min-lr"] = last_rate(flags["decoupled-lr"])
    return Run(plan.family, tuple(sorted(flags.items())), dataset.digest)


def _multiple(text: str, rate: str | None, plan: str) -> str:
    """ "2x" of the arm's own learning rate."""
    if rate is None:
        raise ReproduceError(f"{plan}: decoupled-lr {text} is a multiple of the arm's lr, and it has none: give it")
    return f"{float(text[:-1]) * float(rate):g}"


def _watch(steps: int) -> Flags:
    """What is logged; and that validation text is read once, after the last step, as Megatron does in any case."""
    return {
        "log-interval": str(max(1, steps // _LOG_POINTS)),
        "eval-interval": str(steps + 1),
        "log-timers-to-tensorboard": "",
    }


def validation_batches(run: Run, dataset: Dataset) -> int:
    """All of the validation text, but for the sequences that fill no batch; fewer where the run says so.

    Megatron's own --full-validation goes through it one sequence at a time, which takes several times as long.
    """
    if given := run.value("eval-iters"):
        return int(given)
    return max(1, (dataset.validation_tokens - 1) // run.sequence // run.batch)


def distinct(entries: Sequence[Entry]) -> list[Run]:
    """The runs of the entries, each once, in order."""
    return list(dict.fromkeys(entry.run for entry in entries))


def tokens_of(run: Run) -> int:
    return run.steps * run.batch * run.sequence
