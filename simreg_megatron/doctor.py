# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron doctor`: what is installed here, and whether SimReg fits into it."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from simreg_megatron import __version__
from simreg_megatron.installed import broken_transformer_engine


def doctor(
    script: Annotated[
        Path | None,
        typer.Option(help="your training script, such as pretrain_gpt.py: look at the Megatron it would use"),
    ] = None,
    file: Annotated[Path | None, typer.Argument(metavar="[SCRIPT]", help="the same as --script SCRIPT")] = None,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="try every form of SimReg on the first GPU (is it right, and how fast?), then train a step there",
        ),
    ] = False,
) -> None:
    """Show what is installed, where training would run, and which Megatron functions the plugin would wrap.

    Exit status 1 if SimReg cannot be installed or, with --gpu, if there is no GPU, no fast form is correct on it, or
    the step fails.
    """
    console = Console(markup=False)  # a path may hold brackets
    if (gpu and (script or file)) or (script and file):
        raise typer.BadParameter("give one script, or --gpu alone")
    if gpu:
        _try_forms(console)
        if _has_loop():
            _train_one_step(console)
        return
    script = script or file
    told: list[str] = []
    if script is not None:
        told = list(_look_at_script(script))
        for sentence in told:
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
    if not _has_loop():
        console.print(_NO_LOOP)
    elif _INSTALLS in told or _PARSES_NOTHING in told:
        console.print("SimReg can be installed into this Megatron.")
    else:
        console.print("SimReg can be installed: add `-m simreg_megatron` before your script, and --simreg-lambda auto.")


def _look_at_script(script: Path) -> Iterator[str]:
    """What the text of the script tells; and put the Megatron beside it first, as running it would."""
    try:
        tree = ast.parse(script.read_bytes(), filename=str(script))
    except (OSError, SyntaxError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {script} as Python: {error}", param_hint="SCRIPT") from None
    folder = script.resolve().parent
    sys.path.insert(0, str(folder))
    where = folder if (folder / "megatron" / "core").is_dir() else _place_of_megatron()
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
        yield _INSTALLS
    else:
        yield "It does not mention SimReg: start it with `-m simreg_megatron` before it, or call install() in it."
    if not names & {"pretrain", "initialize_megatron", "parse_args", "parse_and_validate_args"}:
        yield _PARSES_NOTHING
    if "output_processor" in names:
        yield "It passes an output processor, which replaces the per-token loss: SimReg refuses such a forward pass."


_INSTALLS = "It installs SimReg itself."
_PARSES_NOTHING = "It never parses Megatron's flags: pass install(config=SimRegConfig(lambda_=...))."
_NO_LOOP = (
    "SimReg can be installed into training loops of your own, by install(config=SimRegConfig(lambda_=...)). Megatron's "
    "own loop is not here (the wheels before 0.17 have no megatron.training): for that, and for the --simreg-* flags, "
    "put the Megatron-LM source tree of this release on PYTHONPATH; the launch scripts take it as MEGATRON_PATH."
)


def _place_of_megatron() -> str:
    """Which one an import finds: a source tree on PYTHONPATH comes before what is installed."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        return "none: it is not installed"
    folder = Path(next(iter(found.submodule_search_locations))).parents[1]
    return "the installed megatron-core" if folder.name in ("site-packages", "dist-packages") else str(folder)


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
        found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        return f"Device: {found}; `simreg-megatron doctor --gpu` tries a step there."
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


_ONE_STEP = (
    "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--num-layers", "1",
    "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "64", "--max-position-embeddings", "64",
    "--micro-batch-size", "2", "--global-batch-size", "2", "--train-iters", "1", "--lr", "1e-3", "--eval-iters", "0",
    "--eval-interval", "9", "--log-interval", "1", "--transformer-impl", "local", "--no-persist-layer-norm",
    "--no-masked-softmax-fusion", "--no-rope-fusion", "--no-gradient-accumulation-fusion", "--simreg-lambda", "1",
)  # fmt: skip


def _train_one_step(console: Console) -> None:
    """Train a tiny model for one step, started as a user's run is, and print Megatron's log line of it."""
    script = Path(__file__).with_name("pretrain.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "simreg_megatron", str(script)]
    done = subprocess.run([*command, *_ONE_STEP], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "simreg loss" in line]
    if done.returncode or not lines:
        cause = done.stderr.partition("torch/distributed/elastic/")[0]  # before torchrun's own traceback
        console.print(f"A step of a tiny model failed:\n{done.stdout[-1000:]}{cause[-4000:]}", soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"A step of a tiny model: {lines[-1].strip()}", soft_wrap=True)


def _apex_sentence() -> str:
    """NVIDIA's apex has optimizers and a C extension; the package of that name in the public index has neither."""
    if importlib.util.find_spec("apex") is None:
        return "apex: not installed (optional; build NVIDIA's from github.com/NVIDIA/apex, never `pip install apex`)."
    if importlib.util.find_spec("apex.optimizers") is None or importlib.util.find_spec("apex.normalization") is None:
        return "apex: NOT NVIDIA's (another package of that name): pip uninstall apex, then build NVIDIA's from source."
    return "apex: NVIDIA's."


def _has_loop() -> bool:
    from simreg_megatron.plugin import compat

    return compat.has_training_loop()


def _seams() -> tuple[Table, bool]:
    """What SimReg needs of this Megatron, and whether all of it is there."""
    from simreg_megatron.plugin import compat

    _use_cpu_if_alone()
    table = Table(title=f"Megatron {compat.megatron_version()}", title_justify="left")
    table.add_column("function the plugin wraps", overflow="fold")
    table.add_column("found", overflow="fold", max_width=20)
    table.add_column("because", overflow="fold")
    complete = True
    try:
        models = compat.model_seams()
    except compat.MegatronSeamError:
        models = (compat.MODEL_SEAM,)
    constructors = [compat.built(seam) for seam in models]
    of_the_loop = compat.TRAINING_SEAMS if _has_loop() else ()
    for seam in (*models, *constructors, *of_the_loop, *compat.SCHEDULER_SEAMS):
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
    import torch

    from simreg_megatron.cpu import backend as cpu_backend

    if not torch.cuda.is_available():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
            cpu_backend.activate()
