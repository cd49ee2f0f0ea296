# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron doctor`: what is installed here, and whether SimReg fits into it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simreg_megatron.config import __version__
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.cpu.installed import broken_transformer_engine
from simreg_megatron.notices import SentenceError
from simreg_megatron.plugin import compat

_DESCRIPTION = """Show what is installed, where training would run, and which Megatron functions the plugin would wrap.
Exit status 1 if SimReg cannot be installed or, with --gpu, if there is no GPU or the step fails."""


def add_command(commands: Any) -> None:
    """Add `doctor` to the subparsers of the command line."""
    parser = commands.add_parser("doctor", help="check the installation", description=_DESCRIPTION)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--script", type=Path, help="your training script, such as pretrain_gpt.py: look at the Megatron it would use")
    text = "compare SimReg's Triton kernels with plain torch on the first GPU, then train a step there"
    add("--gpu", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.gpu and importlib.util.find_spec("torch"):
        return 0 if _try_triton() and (not compat.has_training_loop() or _train_one_step()) else 1
    about_script = list(_look_at_script(options.script)) if options.script else []
    print(*about_script, sep="\n", end="\n" * bool(about_script))
    print(f"simreg-megatron {__version__}, Python {sys.version.split()[0]}")
    for name, says in (
        ("torch", "missing: SimReg needs it"),
        ("megatron-core", "missing: pip install megatron-core, or put a Megatron-LM tree on PYTHONPATH"),
        ("transformer-engine", "not installed (optional: the fused layers for GPUs)"),
        ("triton", "not installed (optional)"),
        ("sentencepiece", "not installed (the built-in corpus needs it)"),
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            says = importlib.metadata.version(name)
        print(f"  {name:20}{says}")
    try:
        import torch
    except (ImportError, OSError) as error:
        print(f"torch cannot be imported ({error}): install it, or install it again")
        return 1
    print(*filter(None, (_device_sentence(torch), _apex_sentence(), broken_transformer_engine())), sep="\n")
    if not _print_seams():
        print("SimReg cannot be installed into this Megatron: see the rows marked missing.")
        return 1
    if not compat.has_training_loop():
        print(_NO_LOOP)
    elif _INSTALLS in about_script or _PARSES_NOTHING in about_script:
        print("SimReg can be installed into this Megatron.")
    else:
        print("SimReg can be installed: add `-m simreg_megatron` before your script, and --simreg-lambda auto.")
    return 0


def _look_at_script(script: Path) -> Iterator[str]:
    """Yield what the names in the script mean for SimReg; put the Megatron next to it first, as running it would."""
    try:
        with tokenize.open(script) as stream:
            names = {token.string for token in tokenize.generate_tokens(stream.readline) if token.type == tokenize.NAME}
    except (OSError, SyntaxError, ValueError, tokenize.TokenError) as error:
        raise SentenceError(f"cannot read {script} as Python: {error}") from None
    sys.path.insert(0, str(script.resolve().parent))
    spec = None
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("megatron.core")  # in a tree on PYTHONPATH before an installed one
    place = Path(spec.origin).parents[2] if spec and spec.origin else "nowhere: it is not installed"
    yield f"Script: {script}, with Megatron from {place}."
    if {"simreg_megatron", "install"} <= names:
        yield _INSTALLS
    else:
        yield "It does not mention SimReg: start it with `-m simreg_megatron` before it, or call install() in it."
    if not names & {"pretrain", "initialize_megatron", "parse_args", "parse_and_validate_args"}:
        yield _PARSES_NOTHING
    if models := sorted(names & {seam.owner for seam in (*compat.FORWARD_SEAMS, *compat.MASK_SEAMS)}):
        yield f"It names {' and '.join(models)}: SimReg regularises the loss of that model."
    if "output_processor" in names:
        yield "It passes an output processor, which replaces the per-token loss: SimReg refuses such a forward pass."


_INSTALLS = "It installs SimReg itself."
_PARSES_NOTHING = "It never parses Megatron's flags: pass install(config=SimRegConfig(lambda_=...))."
_NO_LOOP = (
    "SimReg can be installed into training loops of your own, by install(config=SimRegConfig(lambda_=...)). Megatron's "
    "own loop is not here (the wheels before 0.17 have no megatron.training): for that, and for the --simreg-* flags, "
    "put the Megatron-LM source tree of this release on PYTHONPATH; the launch scripts take it as MEGATRON_PATH."
)


def _device_sentence(torch: Any) -> str:
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        return f"Device: {gpus}; `simreg-megatron doctor --gpu` tries a step there."
    return "Device: no GPU; the launch scripts train on the CPU by themselves, your own script does with --simreg-cpu."


def _try_triton() -> bool:
    """Try SimReg's Triton kernels on the shapes of two models of the paper; return False where there is no GPU."""
    import torch

    from simreg_megatron.losses.trial import Shape, failure_of

    if not torch.cuda.is_available():
        print("torch sees no GPU here, so SimReg's kernels cannot be tried on one.")
        return False
    print(_device_sentence(torch))
    device = torch.device("cuda", torch.cuda.current_device())
    for name, batch, width in (("LLaMA 350M", 16, 1024), ("LLaMA 7B", 2, 4096)):
        shape = Shape(batch, 2048, width, 1024, torch.bfloat16)
        failure = failure_of("triton", shape, device)
        print(f"{name}, {shape}: triton {failure or 'is right'}{'; impl auto takes tiled' if failure else ''}")
    return True


_ONE_STEP = (
    "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--num-layers", "1",
    "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "64", "--max-position-embeddings", "64",
    "--micro-batch-size", "2", "--global-batch-size", "2", "--train-iters", "1", "--lr", "1e-3", "--eval-iters", "0",
    "--eval-interval", "9", "--log-interval", "1", "--transformer-impl", "local", "--no-persist-layer-norm",
    "--no-masked-softmax-fusion", "--no-rope-fusion", "--no-gradient-accumulation-fusion", "--simreg-lambda", "1",
)  # fmt: skip


def _train_one_step() -> bool:
    """Train a tiny model for one step, started as a user's run is; print Megatron's log line of it, or the error."""
    script = Path(__file__).parents[1] / "pretrain.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "simreg_megatron", str(script)]
    done = subprocess.run([*command, *_ONE_STEP], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "simreg loss" in line]
    if done.returncode or not lines:
        cause = done.stderr.partition("torch/distributed/elastic/")[0]  # before torchrun's own traceback
        print(f"A step of a tiny model failed:\n{done.stdout[-1000:]}{cause[-4000:]}")
        return False
    print(f"A step of a tiny model: {lines[-1].strip()}")
    return True


def _apex_sentence() -> str:
    """Distinguish NVIDIA's apex, which has optimizers, from the package of that name in the public index."""
    if (spec := importlib.util.find_spec("apex")) is None:
        return "apex: not installed (optional; build NVIDIA's from github.com/NVIDIA/apex, never `pip install apex`)."
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]  # importing the other one may fail
    if not any((folder / "optimizers").is_dir() and (folder / "normalization").is_dir() for folder in folders):
        return "apex: NOT NVIDIA's (another package of that name): pip uninstall apex, then build NVIDIA's from source."
    return "apex: NVIDIA's."


def _print_seams() -> bool:
    """Print what SimReg needs of this Megatron; return whether all of it is there."""
    import torch

    from simreg_megatron.plugin import hooks  # which imports torch

    if not torch.cuda.is_available():  # importing Megatron asks for CUDA
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
            cpu_backend.activate()
    print(f"Megatron {compat.megatron_version()}, and what the plugin wraps in it:")
    complete, seams = True, [compat.MODEL_SEAM]
    with contextlib.suppress(compat.MegatronSeamError):
        seams = [seam for seam, _ in hooks.seams_to_wrap(with_flags=True)]
    for seam in seams:
        status = "found"
        try:
            seam.holder()
        except compat.MegatronSeamError as error:
            complete, status = False, f"missing: {error}"
        print(f"  {seam.path}: {status}\n    {seam.purpose}")
    return complete
