# SPDX-License-Identifier: Apache-2.0
"""Commands that have not moved to `add_command` yet."""

from __future__ import annotations

import typer

from simreg_megatron.checkpoint import commands as checkpoint_commands
from simreg_megatron.evaluation import commands as evaluation_commands

app = typer.Typer(add_completion=False)
checkpoint_commands.register(app)
evaluation_commands.register(app)
