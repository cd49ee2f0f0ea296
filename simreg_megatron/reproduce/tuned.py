# SPDX-License-Identifier: Apache-2.0
"""Which trial of a search was the best: the lowest validation loss among all that were asked for, never among some."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import Arm, Flags, Plan
from simreg_megatron.reproduce.presets import is_real
from simreg_megatron.reproduce.runs import Entry, Tuned
from simreg_megatron.reproduce.shapes import Shape
from simreg_megatron.reproduce.store import Store


def tuned_in(search: Plan, entries: Sequence[Entry], store: Store) -> Tuned:
    """Looks up the best trial of an arm at a size; at a size that was not searched, that of the nearest one.

    Args:
        entries: of the search.

    The look-up raises ReproduceError where no size's trials have all ended.
    """
    ready = searched_sizes(search, ended_trials(entries, store))

    def best(arm: str, size: int | str) -> Flags:
        if arm not in [searched.name for searched in search.arms]:
            raise ReproduceError(f"the experiment {search.name} has no arm {arm} whose best trial could be taken")
        if is_real(size):
            return settings_of_paper(search, arm)
        if not ready:
            raise ReproduceError(
                f"the settings of {arm} come from the experiment {search.name}, which has not ended: run "
                f"`simreg-megatron reproduce {search.name}` with the same --output first"
            )
        nearest = nearest_size(ready, size)
        chosen = min(_of(arm, nearest, entries), key=lambda entry: _loss(entry, store))
        return search.arm(arm).flags | search.arm(arm).trials_of(nearest)[chosen.trial - 1]

    return best


def ended_trials(entries: Sequence[Entry], store: Store) -> Counter[tuple[str, str]]:
    """How many of a search's runs have ended, by arm and size."""
    return Counter((entry.arm, str(entry.size)) for entry in entries if store.result(entry.run))


def searched_sizes(search: Plan, ended: Mapping[tuple[str, str], int]) -> list[int | str]:
    """Where all trials of all its arms have ended: elsewhere one arm would be tuned at its size, and another not."""

    def is_complete(arm: Arm, size: int | str) -> bool:
        runs = len(arm.trials_of(size)) * search.seeds_at(size) * len(search.tokens_per_parameter)
        return ended.get((arm.name, str(size)), 0) >= runs > 0

    return [size for size in search.sizes if all(is_complete(arm, size) for arm in search.arms)]


def lenders(sizes: Sequence[int | str], searched: Sequence[int | str]) -> dict[int | str, int | str]:
    """The sizes of a plan that take the settings of another one, and that one."""
    wanted = [size for size in sizes if not is_real(size) and size not in searched]
    return {size: nearest_size(searched, size) for size in wanted if searched}


def borrowed(sizes: Sequence[int | str], searched: Sequence[int | str]) -> str:
    """The same as one line; "" where there are none."""
    pairs = lenders(sizes, searched).items()
    return "; ".join(f"settings of width {lender} used at {size}" for size, lender in pairs)


def settings_of_paper(search: Plan, arm: str) -> Flags:
    """At a preset's size, which no search covers: what the preset says, and how the arm differs from it."""
    return search.arm(arm).flags | search.arm(arm).preset


def first_trial_of(search: Plan) -> Tuned:
    """Stands in for the best one where only running matters."""

    def first(arm: str, size: int | str) -> Flags:
        if is_real(size):
            return settings_of_paper(search, arm)
        return search.arm(arm).flags | search.arm(arm).trials_of(size)[0]

    return first


def nearest_size(sizes: Sequence[int | str], wanted: int | str) -> int | str:
    """Of those that were searched, by their parameters."""
    return min(sizes, key=lambda size: _distance(size, wanted))


def _of(arm: str, size: int | str, entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.arm == arm and entry.size == size]


def _loss(entry: Entry, store: Store) -> float:
    return ranked((store.result(entry.run) or {}).get("validation_loss"))


def ranked(loss: float | None) -> float:
    """A loss by which trials are compared: a run that diverged has none, or one that is no number."""
    return math.inf if loss is None or math.isnan(loss) else loss


def refuse_unfit(plan: Plan, search: Plan) -> None:
    """A plan's `tuned_in` must be a search that has the arms which it names.

    Raises:
        ReproduceError: it is not, or has not.
    """
    if not search.is_search:
        raise ReproduceError(f"{plan.name} is tuned_in {search.name}, and that is no search: its arms have no trials")
    names = [arm.name for arm in search.arms]
    for arm in plan.arms:
        if arm.tuned_as and arm.tuned_as not in names:
            raise ReproduceError(
                f"{plan.name}: {arm.name} is tuned_as {arm.tuned_as}, and the arms of {search.name} are "
                f"{', '.join(names)}"
            )


def _distance(size: int | str, wanted: int | str) -> float:
    """In powers of two of the parameters; presets lie beyond all widths."""
    if isinstance(size, str) or isinstance(wanted, str):
        return 0.0 if size == wanted else 1000.0 - (0 if isinstance(size, str) else size / 1000)
    return abs(math.log2(Shape(size).parameters / Shape(wanted).parameters))


def untuned(arm: str, size: int | str) -> Flags:
    """For plans whose arms are run as they are written."""
    raise AssertionError(f"{arm} asks for tuned settings in a plan without tuned_in")
