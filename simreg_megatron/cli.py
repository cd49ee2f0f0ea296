# SPDX-License-Identifier: Apache-2.0
"""The `simreg-megatron` command."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from simreg_megatron import __version__
from simreg_megatron.checkpoint import commands as checkpoint_commands
from simreg_megatron.data.commands import app as data_commands
from simreg_megatron.evaluation import commands as evaluation_commands
from simreg_megatron.reproduce import commands as reproduce_commands
from simreg_megatron.reproduce.report_commands import app as report_commands

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="SimReg for Megatron-LM: look before you train, prepare text, export and evaluate what came out.",
)
app.add_typer(data_commands, name="data")
checkpoint_commands.register(app)
evaluation_commands.register(app)
reproduce_commands.register(app)
app.add_typer(report_commands, name="report")


@app.callback()
def _root() -> None:
    """SimReg for Megatron-LM: look before you train, prepare text, export and evaluate what came out."""


@app.command()
def doctor(
    script: Annotated[
        Path | None,
        typer.Option(help="your training script, such as pretrain_gpt.py: look at the Megatron it would use"),
    ] = None,
) -> None:
    """Tell what is installed, where training would run, and what of Megatron the plugin would wrap.

    Exit status 1 where SimReg could not be installed.
    """
    console = Console(width=max(120, Console().width))
    if script is not None:
        for sentence in _look_at_script(script):
            console.print(sentence, soft_wrap=True)
    console.print(_packages())
    console.print(_device_sentence())
    console.print(_apex_sentence())
    table, complete = _seams()
    console.print(table)
    if not complete:
        console.print("SimReg cannot be installed into this Megatron: see the rows marked missing.")
        raise typer.Exit(1)
    console.print("SimReg can be installed: add `-m simreg_megatron` before your script, and --simreg-lambda 10.")


def _look_at_script(script: Path) -> Iterator[str]:
    """What the text of the script tells; and put the Megatron beside it first, as running it would."""
    try:
        tree = ast.parse(script.read_bytes(), filename=str(script))
    except (OSError, SyntaxError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {script} as Python: {error}", param_hint="--script") from None
    folder = script.resolve().parent
    sys.path.insert(0, str(folder))
    where = folder if (folder / "megatron" / "core").is_dir() else "the installed megatron-core"
    yield f"Script: {script}, with Megatron from {where}."
    names: set[str | None] = set()
    imported: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.name for alias in node.names} | {getattr(node, "module", None)}
        elif isinstance(node, ast.Attribute | ast.Name):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.keyword):
            names.add(node.arg)
    if "simreg_megatron" in imported and "install" in names | imported:
        yield "It installs SimReg itself."
    else:
        yield "It does not mention SimReg: start it with `-m simreg_megatron` before it, or call install() in it."
    if not names & {"pretrain", "initialize_megatron", "parse_args", "parse_and_validate_args"}:
        yield "It never parses Megatron's flags: pass install(config=SimRegConfig(lambda_=...))."
    if "output_processor" in names:
        yield "It passes an output processor, which replaces the per-token loss: SimReg refuses such a forward pass."


def _packages() -> Table:
    table = Table(title=f"simreg-megatron {__version__}, Python {sys.version.split()[0]}", title_justify="left")
    table.add_column("package")
    table.add_column("version")
    for name, missing in (
        ("torch", "missing: SimReg needs it"),
        ("megatron-core", "missing: pip install megatron-core, or put a Megatron-LM tree on PYTHONPATH"),
        ("transformer-engine", "not installed (optional: the fused layers for GPUs)"),
        ("triton", "not installed (optional)"),
        ("sentencepiece", "not installed (the built-in corpus needs it)"),
    ):
        table.add_row(name, _version(name) or missing)
    return table


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_sentence() -> str:
    if importlib.util.find_spec("torch") is None:
        return "Device: unknown, torch is missing."
    import torch

    if torch.cuda.is_available():
        return f"Device: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}; training runs there."
    return "Device: no GPU; the launch scripts train on the CPU by themselves, your own script does with --simreg-cpu."


def _apex_sentence() -> str:
    """NVIDIA's apex has optimizers and a C extension; the package of that name in the public index has neither."""
    if importlib.util.find_spec("apex") is None:
        return "apex: not installed (optional; build NVIDIA's from github.com/NVIDIA/apex, never `pip install apex`)."
    if importlib.util.find_spec("apex.optimizers") is None or importlib.util.find_spec("apex.normalization") is None:
        return "apex: NOT NVIDIA's (another package of that name): pip uninstall apex, then build NVIDIA's from source."
    return "apex: NVIDIA's."


def _seams() -> tuple[Table, bool]:
    from simreg_megatron.plugin import compat

    _use_cpu_if_alone()
    table = Table(title=f"Megatron {compat.megatron_version()}", title_justify="left")
    table.add_column("function the plugin wraps", no_wrap=True)
    table.add_column("found")
    table.add_column("because", overflow="fold")
    complete = True
    try:
        models = compat.model_seams()
    except compat.MegatronSeamError:
        models = (compat.MODEL_SEAM,)
    births = [compat.built(seam) for seam in models]
    for seam in (*models, *births, *compat.TRAINING_SEAMS, *compat.SCHEDULER_SEAMS):
        try:
            seam.holder()
            found = "yes"
        except compat.MegatronSeamError as error:
            found = f"missing: {error}"
            complete = False
        table.add_row(seam.path, found, seam.purpose)
    return table, complete


def _use_cpu_if_alone() -> None:
    """Importing Megatron asks for CUDA; where there is none, look through the CPU stand-ins."""
    import contextlib
    import io

    import torch

    from simreg_megatron.plugin import cpu_backend

    if not torch.cuda.is_available():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
            cpu_backend.activate()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
