# SPDX-License-Identifier: Apache-2.0
"""What a folder of tables allows to say of one of its experiments: verdicts, and what to know with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from simreg_megatron.report.welch import LEVEL, holm
from simreg_megatron.reproduce.check import Table, sizes_of, violations
from simreg_megatron.reproduce.plan import Arm, Flags, Plan, as_content
from simreg_megatron.reproduce.plan_file import plan_names, read_plan
from simreg_megatron.reproduce.tuned import borrowed, lenders
from simreg_megatron.reproduce.verdict import Runs, Verdict, judge, machines_of

_OF_THE_METHOD = ("simreg-", "adagc")
_MEASURING = {("simreg-objective", "none")}
"""Not a setting of the training: SimReg's numbers in the log of plain cross-entropy."""


def verdicts_on(name: str, tables: Mapping[str, Table]) -> list[Verdict]:
    """Of a table without violations; what tokens are worth is asked of the other tables, too."""
    plan = tables[name].plan
    found = judge(plan, tables[name].rows, list(_comparable(name, tables)))
    of = {str(size): str(lender) for size, lender in lenders(plan.sizes, _searched(plan, tables)).items()}
    return [
        replace(
            verdict,
            lender=of.get(verdict.place.size, ""),
            is_tuned=all(_is_tuned(plan.arm(arm), name, tables) for arm in (verdict.claim.arm, verdict.claim.than)),
        )
        for verdict in found
    ]


class Together(NamedTuple):
    """Claims that were each tested by itself, and what is left of them once their number counts.

    A claim with a direction may be decided for or against, so it is counted with the p-value of both sides. What
    several tables or claims compare alike is one test.

    Attributes:
        tests: each comparison once, the surest first.
        held: how many held, each by itself.
        left: how many of the first are decided, for the claim or against it (Holm).
    """

    tests: list[Verdict]
    held: int
    left: int

    @classmethod
    def of(cls, verdicts: Iterable[Verdict]) -> Together:
        each = {verdict.test: verdict for verdict in verdicts if not any(verdict.diverged)}
        tests = sorted(each.values(), key=lambda verdict: verdict.two_sided)
        return cls(tests, sum(test.held for test in tests), holm([test.two_sided for test in tests]))

    @property
    def sentence(self) -> str:
        """ "" where nothing has to be corrected."""
        if len(self.tests) < 2 or not self.held:
            return ""
        which = f": those with a two-sided p up to {self.tests[self.left - 1].two_sided:.2g}" if self.left else ""
        return (
            f"Of {len(self.tests)} tests, each at {LEVEL} by itself, {self.held} held. Corrected for their number "
            f"(Holm), {self.left} are decided, for the claim or against it{which}."
        )


def _is_tuned(arm: Arm, name: str, tables: Mapping[str, Table]) -> bool:
    """Whether the arm takes over a search on the same text, and sets nothing by hand that this decided.

    Nor anything beside the method's own flags, in which other arms are as they were searched.
    """
    plan = tables[name].plan
    shared = set.intersection(*(set(each.flags.items()) for each in plan.arms))
    own = {flag for flag, value in arm.flags.items() if (flag, value) not in shared}
    by_hand = arm.flags.keys() & _decided(plan, tables) | {flag for flag in own if not flag.startswith(_OF_THE_METHOD)}
    return bool(arm.tuned_as) and not by_hand and not list(_about_the_text(name, tables))


def _decided(plan: Plan, tables: Mapping[str, Table]) -> set[str]:
    """The flags that its search tried several values of; none where that is not in the folder."""
    if plan.tuned_in not in tables:
        return set()
    return {flag for arm in tables[plan.tuned_in].plan.arms for trial in arm.trials for flag in trial}


def _searched(plan: Plan, tables: Mapping[str, Table]) -> list[int | str]:
    """The sizes that its search covered; none where that is not in the folder."""
    return sizes_of(tables[plan.tuned_in]) if plan.tuned_in in tables else []


def _comparable(name: str, tables: Mapping[str, Table]) -> Iterator[Runs]:
    """Tables with shorter runs on the same text, by the same search, that break no rule."""
    own = tables[name]
    for other, table in tables.items():
        if (
            other != name
            and any(arm.length < 1 for arm in table.plan.arms)
            and (table.plan.tuned_in, table.plan.family) == (own.plan.tuned_in, own.plan.family)
            and {row["data"] for row in table.rows} == {row["data"] for row in own.rows}
            and machines_of(table.rows) == machines_of(own.rows)
            and not violations(other, dict(tables))
        ):
            yield table.plan, table.rows


def notes(name: str, tables: Mapping[str, Table]) -> list[str]:
    """A sentence for everything that forbids no conclusion and qualifies it."""
    return [
        *_about_versions(tables[name]),
        *_about_settings(name, tables),
        *_about_the_text(name, tables),
        *_about_flags(name, tables),
        *_about_the_plan(tables[name].plan),
        *_about_its_search(tables[name].plan, tables),
    ]


def _about_versions(table: Table) -> Iterator[str]:
    if len({row["commit"] for row in table.rows}) > 1:
        yield "its runs were made by several versions of the code (column commit)"


def _about_settings(name: str, tables: Mapping[str, Table]) -> Iterator[str]:
    plan = tables[name].plan
    if told := borrowed(plan.sizes, _searched(plan, tables)):
        yield f"{told}: the arms are not tuned there, so a difference may be the settings'"


def _about_the_text(name: str, tables: Mapping[str, Table]) -> Iterator[str]:
    plan, rows = tables[name].plan, tables[name].rows
    if plan.tuned_in in tables and {row["data"] for row in tables[plan.tuned_in].rows} != {row["data"] for row in rows}:
        yield "the search for its settings was made on another text"


def _about_flags(name: str, tables: Mapping[str, Table]) -> Iterator[str]:
    """Arms that are compared and have settings of their own, beside those that the search found without them."""
    plan = tables[name].plan
    searched = _decided(plan, tables)
    if not searched:
        return
    shared = set.intersection(*(set(arm.flags.items()) for arm in plan.arms))
    compared = {arm for claim in plan.claims for arm in (claim.arm, claim.than)}
    told, by_hand = [], []
    for arm in plan.arms:
        own = {flag: value for flag, value in arm.flags.items() if (flag, value) not in shared | _MEASURING}
        if arm.name in compared and not own.keys() <= searched:
            told.append(_with_flags(arm.name, own))
        elif arm.name in compared and (own := {flag: arm.flags[flag] for flag in arm.flags.keys() & searched}):
            by_hand.append(_with_flags(arm.name, own))
    if told:
        yield f"nothing was searched for what sets these arms apart: {'; '.join(told)}"
    if by_hand:
        yield f"these arms do not have what the search found, but what the plan says: {'; '.join(by_hand)}"


def _about_its_search(plan: Plan, tables: Mapping[str, Table]) -> Iterator[str]:
    if plan.tuned_in in tables and plan.tuned_in in plan_names():
        yield from (f"its search {plan.tuned_in}: {told}" for told in _about_the_plan(tables[plan.tuned_in].plan))


def _with_flags(name: str, flags: Flags) -> str:
    return f"{name} ({', '.join(f'{flag} {value}'.strip() for flag, value in sorted(flags.items()))})"


def _about_the_plan(plan: Plan) -> Iterator[str]:
    """How it differs from the plan of that name that ships with the package."""
    if any(claim.metric != "seconds_per_step" for claim in plan.claims) and not plan.tuned_in:
        yield "no search found the settings of its arms, so a difference may be the settings'"
    if plan.name not in plan_names():
        yield (
            f"no plan {plan.name} ships with the package, and nothing in a folder shows whether a plan was written "
            "before its runs"
        )
        return
    own, shipped = _content(plan), _content(read_plan(plan.name))
    for key in ("sizes", "tokens_per_parameter", "seeds", "data", "steps"):
        if own[key] != shipped[key]:
            yield f"{key} {_told(own[key])}, where the plan that ships says {_told(shipped[key])}"
    if changed := [key for key in ("question", "arms", "claims", "family", "tuned_in") if own[key] != shipped[key]]:
        yield f"{' and '.join(changed)} differ from those of the plan {plan.name} that ships"


def _content(plan: Plan) -> dict[str, Any]:
    """Without what arms have beside the presets of real sizes, which decides nothing at the small ones."""
    content = as_content(plan)
    content["arms"] = {
        name: {key: value for key, value in arm.items() if key != "preset"} for name, arm in content["arms"].items()
    }
    return content


def _told(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} at {size}" for size, count in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
