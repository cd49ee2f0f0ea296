# SPDX-License-Identifier: Apache-2.0
"""All readers that are fuzzed, by name."""

from __future__ import annotations

from tests.fuzz.readers import checkpoints, results
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {target.name: target for target in (*checkpoints.TARGETS, *results.TARGETS)}
