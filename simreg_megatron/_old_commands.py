# SPDX-License-Identifier: Apache-2.0
"""Commands that have not moved to `add_command` yet."""

from __future__ import annotations

import typer

from simreg_megatron.data.commands import app as data_commands
from simreg_megatron.reproduce import commands as reproduce_commands
from simreg_megatron.reproduce.report_commands import app as report_commands
from simreg_megatron.reproduce.report_commands import watch

app = typer.Typer(add_completion=False)
app.add_typer(data_commands, name="data")
reproduce_commands.register(app)
app.add_typer(report_commands, name="report")
app.command("watch")(watch)
