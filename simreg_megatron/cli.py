# SPDX-License-Identifier: Apache-2.0
"""The `simreg-megatron` command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import typer
from rich.console import Console
from rich.table import Table

from simreg_megatron import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, help="SimReg for Megatron-LM: look before you train.")


@app.callback()
def _root() -> None:
    """SimReg for Megatron-LM: look before you train."""


@app.command()
def doctor() -> None:
    """Tell what is installed, where training would run, and what of Megatron the plugin would wrap.

    Exit status 1 where SimReg could not be installed.
    """
    console = Console(width=max(120, Console().width))
    console.print(_packages())
    console.print(_device_sentence())
    console.print(_apex_sentence())
    table, complete = _seams()
    console.print(table)
    if not complete:
        console.print("SimReg cannot be installed into this Megatron: see the rows marked missing.")
        raise typer.Exit(1)
    console.print("SimReg can be installed: add `-m simreg_megatron` before your script, and --simreg-lambda 10.")


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

    table = Table(title=f"Megatron {_version('megatron-core') or '(source tree?)'}", title_justify="left")
    table.add_column("function the plugin wraps", no_wrap=True)
    table.add_column("found")
    table.add_column("because", overflow="fold")
    _use_cpu_if_alone()
    complete = True
    for seam in (compat.MODEL_SEAM, *compat.TRAINING_SEAMS):
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
