# SPDX-License-Identifier: Apache-2.0
"""Random numbers that follow from a seed and the iteration: all ranks draw the same, and a resumed run goes on."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def random_numbers(number: int, *, seed: int, iteration: int, device: torch.device) -> Tensor:
    """Draw uniform numbers [number] in [0, 1), the same for equal seeds and iterations on all devices of one kind."""
    generator = seeded_generator(f"placebo {seed} {iteration}", device)
    return torch.rand(number, generator=generator, device=device, dtype=torch.float32)


def seeded_generator(text: str, device: torch.device) -> torch.Generator:
    """Make a generator seeded by a text, with the same numbers on all devices of one kind."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()  # the CPU looks at 32 bits of a seed only
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
