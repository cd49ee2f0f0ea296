# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron export-hf` and `import-hf`. Heavy imports stay inside, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simreg_megatron.terminal import console, one_sentence

if TYPE_CHECKING:
    from simreg_megatron.checkpoint.source import Checkpoint
    from simreg_megatron.checkpoint.tokenizer import Tokenizer


def register(app: typer.Typer) -> None:
    """Add the commands of this package to the program."""
    app.command("export-hf")(export_hf)
    app.command("import-hf")(import_hf)


def export_hf(
    load: Annotated[Path, typer.Option(help="what Megatron's --save named, or one checkpoint's own folder")],
    save: Annotated[Path, typer.Option(help="the folder to make: a Hugging Face model")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="the tokenizer of training: a Hugging Face folder or a sentencepiece .model")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp32 or fp16; the checkpoint's own if left out")] = None,
    ckpt_step: Annotated[int | None, typer.Option(help="which step to take; the newest if left out")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="tokens without padding, if no tokenizer is given")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="compare the logits with those of Megatron's own model, on the CPU")
    ] = False,
) -> None:
    """Write a Megatron checkpoint of a LLaMA or Mixtral as a Hugging Face model, for transformers, vLLM, lm-eval.

    One process, no GPU; any layout of ranks. No code in the checkpoint is run, and the folder appears only
    when it is complete.
    """
    with one_sentence():
        _need_transformers()
        from simreg_megatron.checkpoint.export import DTYPES, export, plan_export
        from simreg_megatron.checkpoint.source import open_checkpoint
        from simreg_megatron.checkpoint.tokenizer import open_tokenizer
        from simreg_megatron.checkpoint.verify import refuse_without_megatron

        if dtype is not None and dtype not in DTYPES:
            raise typer.BadParameter(f"{dtype} is none of {', '.join(DTYPES)}", param_hint="--dtype")
        if verify:
            refuse_without_megatron()
        checkpoint = open_checkpoint(load, ckpt_step)
        words = open_tokenizer(tokenizer) if tokenizer else None
        plan = plan_export(checkpoint, tokenizer=words, dtype=dtype, vocabulary=vocab_size)
        for note in plan.notes:
            console.print(f"note: {note}", markup=False)
        with _progress("exporting") as progress:
            export(plan, save, progress=progress)
        number_type = str(plan.dtype).removeprefix("torch.")
        console.print(f"{save}: {plan.architecture.family}, {number_type}, from {checkpoint.folder}", markup=False)
        if verify:
            _verify(checkpoint, save, words)


def import_hf(
    model: Annotated[Path, typer.Option(help="the folder of a Hugging Face LLaMA or Mixtral, in safetensors files")],
    save: Annotated[Path, typer.Option(help="the folder to make, for Megatron's --load")],
) -> None:
    """Write a Hugging Face LLaMA or Mixtral as a Megatron checkpoint, to continue pretraining from it.

    The checkpoint has no optimizer and no step: Megatron starts at step 0 from its weights, in any layout of ranks.
    """
    with one_sentence():
        _need_transformers()
        from simreg_megatron.checkpoint.dist_writer import flags
        from simreg_megatron.checkpoint.hf_folder import open_model
        from simreg_megatron.checkpoint.hf_import import import_model

        opened = open_model(model)
        with _progress("importing", counts="weights") as progress:
            import_model(opened, save, progress=progress)
        console.print(f"{save}: {opened.architecture.family}, {opened.architecture.dtype}, from {model}", markup=False)
        console.print(f"train from it with: --load {save} {' '.join(flags(opened.architecture))}", markup=False)


def _verify(checkpoint: Checkpoint, model: Path, tokenizer: Tokenizer | None) -> None:
    from simreg_megatron.checkpoint.verify import verify

    with console.status("comparing with Megatron's own model"):
        report = verify(checkpoint, model, tokenizer=tokenizer)
    console.print(str(report), markup=False)
    if not report.agrees:
        raise typer.Exit(1)


def _need_transformers() -> None:
    from importlib.util import find_spec

    from simreg_megatron.checkpoint.errors import CheckpointError

    missing = [name for name in ("transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise CheckpointError(f"packages are missing: pip install {' '.join(missing)}")


@contextmanager
def _progress(what: str, *, counts: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    amount = DownloadColumn() if counts == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
