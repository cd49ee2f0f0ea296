# SPDX-License-Identifier: Apache-2.0
"""The `simreg-megatron` command."""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from simreg_megatron import __version__
from simreg_megatron.checkpoint import commands as checkpoint_commands
from simreg_megatron.data.commands import app as data_commands
from simreg_megatron.evaluation import commands as evaluation_commands
from simreg_megatron.installed import broken_transformer_engine
from simreg_megatron.reproduce import commands as reproduce_commands
from simreg_megatron.reproduce.report_commands import app as report_commands
from simreg_megatron.reproduce.report_commands import watch


class _Commands(TyperGroup):
    """`simreg-megatron prepare` meant `simreg-megatron data prepare`."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        for name, group in self.commands.items():
            if args[0] not in self.commands and args[0] in getattr(group, "commands", {}):
                context.fail(f"there is no command {args[0]}: did you mean `simreg-megatron {name} {args[0]}`?")
        return super().resolve_command(context, args)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    help="SimReg for Megatron-LM: check the installation, prepare data, export and evaluate models, run experiments.",
)
app.add_typer(data_commands, name="data")
checkpoint_commands.register(app)
evaluation_commands.register(app)
reproduce_commands.register(app)
app.add_typer(report_commands, name="report")
app.command("watch")(watch)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"simreg-megatron {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and stop")
    ] = False,
) -> None:
    """SimReg for Megatron-LM: check the installation, prepare data, export and evaluate models, run experiments."""


@app.command()
def doctor(
    script: Annotated[
        Path | None,
        typer.Option(help="your training script, such as pretrain_gpt.py: look at the Megatron it would use"),
    ] = None,
    file: Annotated[Path | None, typer.Argument(metavar="[SCRIPT]", help="the same as --script SCRIPT")] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="try every form of SimReg on the first GPU: is it right, and how fast?")
    ] = False,
) -> None:
    """Show what is installed, where training would run, and which Megatron functions the plugin would wrap.

    Exit status 1 if SimReg cannot be installed or, with --gpu, if there is no GPU or no fast form is correct on it.
    """
    console = Console()
    if gpu:
        _try_forms(console)
        return
    script = script or file
    if script is not None:
        for sentence in _look_at_script(script):
            console.print(sentence, soft_wrap=True)  # a path in one piece
    console.print(_packages())
    console.print(_device_sentence())
    console.print(_apex_sentence())
    broken = broken_transformer_engine()
    if broken:
        console.print(broken, soft_wrap=True)
    table, complete = _seams()
    console.print(table)
    if not complete:
        console.print("SimReg cannot be installed into this Megatron: see the rows marked missing.")
        raise typer.Exit(1)
    console.print("SimReg can be installed: add `-m simreg_megatron` before your script, and --simreg-lambda auto.")


@app.command()
def flags(
    markdown: Annotated[bool, typer.Option("--markdown", help="as docs/flags.md has them")] = False,
) -> None:
    """List the flags that SimReg and AdaGC add to Megatron's, one sentence each."""
    if markdown:
        print(flags_page(), end="")
        return
    width = min(100, Console().width)
    for title, found in _described_flags().items():
        print(f"{title[:1].upper()}{title[1:]}")
        for name, sentence in found:
            print(textwrap.fill(f"{name}  {sentence}", width, initial_indent="  ", subsequent_indent="      "))


def flags_page() -> str:
    """docs/flags.md."""
    lines = [
        "# Flags",
        "",
        "Made by `simreg-megatron flags --markdown` from the parser itself; a test compares the two.",
    ]
    for title, found in _described_flags().items():
        lines += ["", f"## {title[:1].upper()}{title[1:]}", "", "| flag | |", "|---|---|"]
        lines += [f"| `{name}` | {sentence.replace('|', chr(92) + '|')} |" for name, sentence in found]
    return "\n".join([*lines, "", _MORE_FLAGS, ""])


_VALUES = {None: "", int: " N", float: " NUMBER", str: " VALUE"}


def _described_flags() -> dict[str, list[tuple[str, str]]]:
    """By group: each flag with what it takes, and its sentence, as Megatron's parser gets them."""
    from simreg_megatron.plugin.arguments import add_simreg_arguments

    parser = add_simreg_arguments(argparse.ArgumentParser(add_help=False))
    found: dict[str, list[tuple[str, str]]] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            value = "[=force]" if action.nargs == "?" else _VALUES[action.type]  # type: ignore[index]
            text = action.help or ""
            sentence = f"{text[:1].upper()}{text[1:]}."
            found.setdefault(str(group.description), []).append((action.option_strings[0] + value, sentence))
    return found


_MORE_FLAGS = """Of single objectives, and lambda's schedule: [objectives.md](objectives.md). Scope and layouts:
[exact.md](exact.md). The launch scripts' own options: `bash launch/pretrain_llama.sh --help`. With those of Megatron:
`python -m simreg_megatron pretrain_gpt.py --help`."""


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
        raise typer.Exit(1)  # the table of packages has said why
    import torch

    if torch.cuda.is_available():
        return f"Device: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}; training runs there."
    return "Device: no GPU; the launch scripts train on the CPU by themselves, your own script does with --simreg-cpu."


def _try_forms(console: Console) -> None:
    """What a run does before its first step, on the shapes of two models of the paper."""
    import torch

    from simreg_megatron import trial
    from simreg_megatron.comparison import OF_THE_PAPER

    if not torch.cuda.is_available():
        console.print("torch sees no GPU here, so no form of SimReg can be tried on one.")
        raise typer.Exit(1)
    console.print(_device_sentence())
    is_right = True
    for name, shape in OF_THE_PAPER.items():
        trials = trial.try_forms(shape, torch.device("cuda", torch.cuda.current_device()))
        table = Table("impl", "loss off by", "gradient off by", "ms a micro-batch", "", title=f"{name}: {shape}")
        for one in trials:
            time = "" if one.failure else f"{1e3 * one.seconds:.3f}"
            table.add_row(one.impl, f"{one.loss_error:.1e}", f"{one.gradient_error:.1e}", time, one.failure)
        console.print(table)
        is_right &= any(not one.failure for one in trials)
    if not is_right:
        raise typer.Exit(1)


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
    table.add_column("function the plugin wraps", overflow="fold", min_width=42)
    table.add_column("found", overflow="fold", max_width=20)
    table.add_column("because", overflow="fold")
    complete = True
    try:
        models = compat.model_seams()
    except compat.MegatronSeamError:
        models = (compat.MODEL_SEAM,)
    constructors = [compat.built(seam) for seam in models]
    for seam in (*models, *constructors, *compat.TRAINING_SEAMS, *compat.SCHEDULER_SEAMS):
        try:
            seam.holder()
            found = "yes"
        except compat.MegatronSeamError as error:
            found = f"missing: {error}"
            complete = False
        table.add_row(f"{seam.module}\n  {seam.path.removeprefix(seam.module)[1:]}", found, seam.purpose)
    return table, complete


def _use_cpu_if_alone() -> None:
    """Importing Megatron asks for CUDA; where there is none, look through the CPU stand-ins."""
    import contextlib
    import io

    import torch

    from simreg_megatron.cpu import backend as cpu_backend

    if not torch.cuda.is_available():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
            cpu_backend.activate()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # in order: nothing half made stays
    app()


if __name__ == "__main__":
    main()
