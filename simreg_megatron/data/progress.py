# SPDX-License-Identifier: Apache-2.0
"""What a person sees while data is prepared: a live line in a terminal, now and then a line in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from simreg_megatron.data.budget import Reckoning
from simreg_megatron.sentences import one_line

_SECONDS_BETWEEN_LINES = 30.0


class ConsoleProgress:
    """Tokens, tokens per second and the time left, of one set of sources after the other."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._reckoning: Reckoning | None = None
        self._name = ""

    def __enter__(self) -> ConsoleProgress:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
            self._live = Progress(*columns, console=self._console)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.update(last=kind is None)
        if self._live is not None:
            self._live.stop()

    def begin(self, name: str, reckoning: Reckoning) -> None:
        self.update(last=True)
        self._name, self._reckoning = name, reckoning
        self._began = self._said = time.monotonic()
        self._tokens_before, self._share_before = reckoning.tokens, reckoning.share or 0.0
        if self._live is not None:
            self._task = self._live.add_task(name, total=1.0 if reckoning.share is not None else None, told="")

    def tell(self, sentence: str) -> None:
        self._console.print(f"> {one_line(sentence)}", soft_wrap=True, highlight=False, markup=False)

    def update(self, *, last: bool = False) -> None:
        if self._reckoning is None:
            return
        told = self._told()
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._reckoning.share or 0.0, told=told)
        elif last or time.monotonic() - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._console.print(f"> {self._name}: {told}", soft_wrap=True, highlight=False)

    def _told(self) -> str:
        assert self._reckoning is not None
        elapsed = max(time.monotonic() - self._began, 1e-9)
        speed = (self._reckoning.tokens - self._tokens_before) / elapsed
        told = f"{self._reckoning.tokens:,} tokens, {speed:,.0f} tokens/s"
        share = self._reckoning.share
        if share is None or share <= self._share_before:
            return told
        left = (1 - share) * elapsed / (share - self._share_before)
        return f"{told}, {share:.1%}, {int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left"
