# SPDX-License-Identifier: Apache-2.0
"""Commands that have not moved to `add_command` yet."""

from __future__ import annotations

import typer

from simreg_megatron.checkpoint import commands as checkpoint_commands
from simreg_megatron.evaluation import commands as evaluation_commands
from simreg_megatron.reproduce import commands as reproduce_commands
from simreg_megatron.reproduce.report_commands import app as report_commands
from simreg_megatron.reproduce.report_commands import watch

app = typer.Typer(add_completion=False)
checkpoint_commands.register(app)
evaluation_commands.register(app)
reproduce_commands.register(app)
app.add_typer(report_commands, name="report")
app.command("watch")(watch)
