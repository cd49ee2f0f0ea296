# SPDX-License-Identifier: Apache-2.0
"""A program that started others ends in order, whoever ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM is what Ctrl-C is, so that all that was started is stopped in order, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
