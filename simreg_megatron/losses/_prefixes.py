# SPDX-License-Identifier: Apache-2.0
"""Prefixes, the first features of a hidden state, where none are named."""

from __future__ import annotations


def default_prefixes(width: int) -> tuple[int, ...]:
    """Powers of two from 16 to half the width, or half the width, at least 1, where it is below 32."""
    return tuple(2**k for k in range(4, 31) if 2**k <= width // 2) or (max(1, width // 2),)
