# SPDX-License-Identifier: Apache-2.0
"""Which faults there are, when they strike, and the list of a campaign: the same for the same seed.

Signals from inside hit a rank at an event; "clock" hits it from outside, at any moment of a start, imports included.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.faults.layouts import LAYOUTS, SAVE_INTERVAL, STEPS
from tests.faults.starts import COMMAND, SHARED
from tests.faults.strike import SIGNALS, Strike

RANDOM, SAVE, RESUME, START = "random", "in a save", "in a resume", "at the start"
FIRST, LAST, TWICE = "first step", "last step", "twice in a row"
_ANY = (RANDOM, SAVE, RESUME, START, FIRST, LAST, TWICE)
MOMENTS: dict[str, tuple[str, ...]] = {
    "sigkill": _ANY,
    "sigterm": _ANY,
    "sigint": _ANY,
    "sigsegv": _ANY,
    "abort": _ANY,
    "exception": _ANY,
    "node": (RANDOM, SAVE, RESUME, TWICE),  # every process at once
    "torchrun": (RANDOM, SAVE),  # torchrun alone: its ranks train on
    "sigstop": (RANDOM, SAVE, RESUME, FIRST, LAST),
    "gil": (RANDOM, SAVE, RESUME, FIRST, LAST),
    "full-disk": (RANDOM, SAVE, START, TWICE),
    "read-only": (RANDOM, SAVE, RESUME, START),
    "slow": (SAVE, RESUME, START),
    "rerun": (RANDOM,),  # Megatron doubts a loss and computes the step again
}
HANGS = ("sigstop", "gil")
OF_A_DISK = ("full-disk", "read-only")
_EVENTS = {SAVE: ("save", 28), RESUME: ("resume", 8), START: ("write", 12)}
"""The kind of event, and about how many a start has."""
_COMMAND_EVERY = 7


@dataclass(frozen=True)
class Fault:
    layout: str
    kind: str
    moment: str
    seed: int
    way: str = SHARED
    then: str = ""  # the layout that the run goes on in; empty for its own

    @property
    def name(self) -> str:
        words = (self.layout, self.then and f"to-{self.then}", self.kind, self.moment, f"{self.seed}", self.way)
        return "-".join(word.replace(" ", "-") for word in words if word)


def drawn(count: int, seed: int = 0) -> list[Fault]:
    """`count` faults: every kind at every moment of its own, over the layouts in turn, in a shuffled order."""
    endless = _rounds()
    found = [next(endless) for _ in range(count)]
    random.Random(seed).shuffle(found)
    return found


def _rounds() -> Iterator[Fault]:
    pairs = [(kind, moment) for kind, moments in MOMENTS.items() for moment in moments]
    moves = [(name, then) for name, layout in LAYOUTS.items() for then in layout.goes_on_in]
    names = list(LAYOUTS)
    turn = 0
    while True:
        for index, (kind, moment) in enumerate(pairs):
            way = COMMAND if (index + turn) % _COMMAND_EVERY == 0 else SHARED
            yield Fault(names[(index + turn) % len(names)], kind, moment, turn, way)
        for name, then in moves:
            yield Fault(name, "sigkill", (RANDOM, SAVE)[turn % 2], turn, SHARED, then)
        turn += 1


def strikes(fault: Fault, output: str, notes: str, attempt: int = 0) -> list[Strike]:
    """Return the strike of each start in turn; at a later attempt earlier, where the moment did not come."""
    dice = random.Random(f"{fault.name} {attempt}")
    rank = dice.choice((0, 0, LAYOUTS[fault.layout].processes - 1))

    def strike(when: str, number: int, delay: float = 0.0, kind: str = fault.kind) -> Strike:
        return Strike(kind, when, number, delay, rank, output, notes)

    def in_a_step(first: int, last: int) -> Strike:
        return strike("step", dice.randint(first, last), dice.choice((0.0, dice.uniform(0.0, 0.2))))

    def at_an_event(moment: str) -> Strike:
        when, most = _EVENTS[moment]
        number = dice.randint(1, max(1, most >> attempt))
        return strike(when, number, dice.choice((0.0, 0.0, dice.uniform(0.0, 0.02))))

    if fault.then:  # before the first save there is nothing to go on from, and each layout draws its own first weights
        saved = strike("save", dice.randint(9, 28), dice.choice((0.0, dice.uniform(0.0, 0.02))))
        return [replace(saved, rank=0) if fault.moment == SAVE else in_a_step(SAVE_INTERVAL + 1, STEPS)]
    before = strike("step", dice.randint(SAVE_INTERVAL + 1, STEPS), kind="sigkill")
    if fault.kind == "slow":
        when, _ = _EVENTS[fault.moment]
        blow = strike(when, 1, dice.uniform(0.1, 0.5))
        return [before, blow] if fault.moment == RESUME else [blow]
    if fault.kind == "rerun":  # never the first step: Megatron does not doubt that
        return [replace(in_a_step(2, STEPS), delay=0.0, rank=LAYOUTS[fault.layout].processes - 1)]
    if fault.moment == RANDOM:
        outside = fault.kind in SIGNALS or fault.kind in ("node", "torchrun")
        return [strike("clock", 0, dice.random()) if outside and dice.random() < 0.5 else in_a_step(1, STEPS)]
    if fault.moment == TWICE:
        return [in_a_step(2, STEPS), in_a_step(STEPS - 1, STEPS)]
    if fault.moment == RESUME:
        return [before, at_an_event(RESUME)]
    if fault.moment in (SAVE, START):
        return [at_an_event(fault.moment)]
    step = 1 if fault.moment == FIRST else STEPS
    return [in_a_step(step, step)]
