# SPDX-License-Identifier: Apache-2.0
"""What a person sees while something takes long: a bar with the time left in a terminal; elsewhere lines, and never
more than a few seconds without one."""

from __future__ import annotations

import textwrap
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

SILENCE_SECONDS = 5.0  # the longest that a log stays without a line
COLUMNS = 80
_TRUSTED = 0.05  # the share from which on the pace of the work says more than the guess


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """A sentence in lines of at most 80 columns; words, such as paths, stay whole."""
    for line in textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False):
        console.print(line, markup=False, highlight=False, soft_wrap=True, style=style)


class Screen:
    """One piece of work on a console.

    Args:
        what: its name, before the bar.
        seconds: how long it probably takes; the bar follows it until `share` is told.
    """

    def __init__(self, console: Console, what: str, seconds: float) -> None:
        self._console, self._what, self._seconds = console, what, seconds
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bars.add_task(what, total=1.0, told="")
        self._began = self._spoke = time.monotonic()
        self._share: float | None = None

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._spoke = time.monotonic()
        say(self._console, text)

    def done(self, share: float) -> None:
        """How much of the work is behind, from 0 to 1."""
        self._share = share

    def tick(self) -> None:
        """To be called now and then: the bar moves on, or a log gets a line after a silence."""
        now = time.monotonic()
        share, left = self._standing(now - self._began)
        told = f"{share:.0%}, {duration(left)} left"
        self._bars.update(self._task, completed=share, told=told)
        if not self._console.is_terminal and now - self._spoke >= SILENCE_SECONDS:
            self.line(f"... {self._what}: {told}")

    def _standing(self, elapsed: float) -> tuple[float, float]:
        """(share behind, seconds left)"""
        if self._share is None or self._share < _TRUSTED:
            left = max(self._seconds - elapsed, elapsed / 4)  # beyond the guess nobody knows, and no bar is full
            return max(elapsed / (elapsed + left), self._share or 0.0), left
        return self._share, elapsed * (1 - self._share) / self._share


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
