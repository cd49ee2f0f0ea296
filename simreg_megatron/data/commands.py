# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron data`: prepare, merge, tokenizer, corpus-builtin, corpus-large, histogram."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from simreg_megatron.sentences import one_line
from simreg_megatron.terminal import one_sentence

app = typer.Typer(no_args_is_help=True, help="From text to Megatron's .bin/.idx, and what is in them.")

_SMALLEST_BLOCK = 1 << 16
_STOPPED = "stopped: run the same command to continue"

_Out = Annotated[
    Path, typer.Option(help="folder of the set: train.bin, train.idx, valid.bin, valid.idx, manifest.json")
]
_Tokens = Annotated[
    str,
    typer.Option(help="at most so many training tokens, such as 20B or 500M; the document that reaches it is the last"),
]
_ValidTokens = Annotated[str, typer.Option(help="the same for the --valid sources")]


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help=".jsonl, .jsonl.gz, .jsonl.zst, .parquet and .txt files (a .txt is one document), folders of them, "
            "hf:NAME[:CONFIGURATION][@REVISION] of the Hub, or c4 (allenai/c4, en); the last two use the network"
        ),
    ],
    out: _Out,
    tokenizer: Annotated[
        str,
        typer.Option(help="a sentencepiece .model file, or a Hugging Face folder or name (a name uses the network)"),
    ] = "",
    train_tokenizer: Annotated[
        int,
        typer.Option(
            metavar="PIECES",
            show_default=False,
            help="train one with so many pieces on these sources, into OUT/tokenizer.model",
        ),
    ] = 0,
    tokens: _Tokens = "",
    valid: Annotated[
        list[str] | None, typer.Option(help="a source for the validation set alone; may be repeated")
    ] = None,
    valid_share: Annotated[
        float | None,
        typer.Option(
            help="without --valid: share of the documents to use for validation (default: 0.005; c4 has its own set)"
        ),
    ] = None,
    valid_tokens: _ValidTokens = "",
    key: Annotated[str, typer.Option(help="the key or column that has the text")] = "text",
    bos: Annotated[str, typer.Option(help="begin-of-text token: none, or document for one before each")] = "none",
    on_error: Annotated[
        str, typer.Option(help="at a broken line: stop, or skip it (counted and listed in the manifest)")
    ] = "stop",
    workers: Annotated[
        int,
        typer.Option(show_default=False, help="processes (default: one per core); the output does not depend on it"),
    ] = 0,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="only the part of machine I of N; then `data merge`")
    ] = "1/1",
    block_size: Annotated[
        str, typer.Option(help="text in one part; a kill loses at most one part for each worker")
    ] = "32M",
) -> None:
    """Tokenize text into training and validation sets. The same command resumes where a killed one stopped."""
    with one_sentence(stopped=_STOPPED):
        from simreg_megatron.data.assemble import MANIFEST
        from simreg_megatron.data.indexed import DataError
        from simreg_megatron.data.prepare import prepare, workers_here
        from simreg_megatron.data.progress import ConsoleProgress
        from simreg_megatron.data.settings import refuse_changed
        from simreg_megatron.data.task import Task, inputs_of
        from simreg_megatron.data.trained import ensure_trained

        if out.exists() and not out.is_dir():
            raise DataError(f"--out {out} is a file: name a folder")
        place = _shard(shard)
        if bool(tokenizer) == bool(train_tokenizer):
            raise DataError("give --tokenizer (a file, folder or name) or --train-tokenizer (a number of pieces)")
        if train_tokenizer and place[1] > 1:
            raise DataError(
                "shards need one tokenizer: make it once with `simreg-megatron data tokenizer`, then --tokenizer"
            )
        if sources == ["c4"] and not Path("c4").exists() and not valid and valid_share is None:
            valid = ["c4"]
        if valid_share is None:
            valid_share = 0.0 if valid else 0.005
        task = Task(
            sources=sources,
            output=out,
            tokenizer=tokenizer or str(out / "tokenizer.model"),
            valid_sources=valid or (),
            valid_share=valid_share,
            tokens=_number(tokens, "tokens"),
            valid_tokens=_number(valid_tokens, "valid-tokens"),
            key=key,
            bos=bos,
            on_error=on_error,
            workers=workers or workers_here(),
            shard=place,
            block_bytes=_block_bytes(block_size),
        )
        if train_tokenizer:
            inputs = inputs_of(task, lambda _: None)["train"]
            ensure_trained(inputs, Path(task.tokenizer), vocab_size=train_tokenizer, key=key, tell=_say)
        with ConsoleProgress() as progress:
            manifest = prepare(task, progress)
        if manifest is None:
            print(f"shard {shard} is done; after the last one: simreg-megatron data merge {out}")
        else:
            refuse_changed(out, manifest, MANIFEST)
            _summarize(manifest, out)


@app.command()
def merge(
    out: Annotated[Path, typer.Argument(help="the folder with the parts of all shards")],
    tokens: _Tokens = "",
    valid_tokens: _ValidTokens = "",
) -> None:
    """Join the parts of all shards: the same bytes as from one machine."""
    with one_sentence(stopped=_STOPPED):
        from simreg_megatron.data.assemble import MANIFEST
        from simreg_megatron.data.prepare import merge
        from simreg_megatron.data.settings import refuse_changed

        given = {"train": _number(tokens, "tokens"), "valid": _number(valid_tokens, "valid-tokens")}
        manifest = merge(out, given)
        refuse_changed(out, manifest, MANIFEST)
        _summarize(manifest, out)


@app.command(name="tokenizer")
def make_tokenizer(
    sources: Annotated[list[str], typer.Argument(help="as of `data prepare`")],
    output: Annotated[Path, typer.Option(help="the .model file to write")],
    vocab_size: Annotated[int, typer.Option(help="pieces")] = 32000,
    key: Annotated[str, typer.Option(help="the key or column that has the text")] = "text",
) -> None:
    """Train a sentencepiece tokenizer (byte pairs, every byte representable) on a sample of the sources."""
    with one_sentence(stopped=_STOPPED):
        from simreg_megatron.data.indexed import DataError
        from simreg_megatron.data.sources import find_inputs
        from simreg_megatron.data.trained import ensure_trained

        if output.suffix != ".model":
            raise DataError(f"--output takes a name that ends in .model, not {output.name}")
        if output.exists():
            raise DataError(f"{output} already exists: give another --output, or remove it")
        ensure_trained(find_inputs(sources), output, vocab_size=vocab_size, key=key, tell=_say)
        print(output)


@app.command()
def corpus_builtin(out: Annotated[Path, typer.Option(help="folder of the set")] = Path("data/builtin")) -> None:
    """The documentation of the Python libraries on this machine, as the demo trains on it: another text elsewhere."""
    with one_sentence(stopped=_STOPPED):
        from simreg_megatron.data import ensure_builtin_corpus

        corpus = ensure_builtin_corpus(out)
        for side, tokens in corpus.manifest["tokens"].items():
            print(f"{out / side}: {tokens:,} tokens")
        print(f"{corpus.manifest_path} tells the rest.")


@app.command()
def corpus_large(
    out: Annotated[Path, typer.Option(help="folder of the set: train, valid and test, tokenizer.model, manifest.json")],
    packages: Annotated[
        Path | None,
        typer.Option(show_default=False, help="where the fetched packages are kept (default: OUT.packages)"),
    ] = None,
    workers: Annotated[int, typer.Option(show_default=False, help="processes that tokenize (default: the cores)")] = 0,
    update_lock: Annotated[
        bool,
        typer.Option("--update-lock", help="first pin the versions that the archive has today: another corpus"),
    ] = False,
) -> None:
    """Forty million tokens of English from Debian's documentation packages: the same bytes on every machine."""
    with one_sentence(stopped=_STOPPED):
        from simreg_megatron.data.large import ensure_large_corpus
        from simreg_megatron.data.large import update_lock as pin
        from simreg_megatron.data.prepare import workers_here

        packages = packages or out.with_name(f"{out.name}.packages")
        if update_lock:
            pin(packages)
        corpus = ensure_large_corpus(out, packages=packages, workers=workers or workers_here())
        for side, tokens in corpus.manifest["tokens"].items():
            ratio = corpus.manifest["bytes_per_token"][side]
            print(f"{out / side}: {tokens:,} tokens, {ratio:.4f} bytes of text for each")
        print(f"{corpus.manifest_path} tells the rest.")


@app.command()
def histogram(
    prefix: Annotated[Path, typer.Argument(help="of PREFIX.bin and PREFIX.idx")],
    output: Annotated[
        Path | None, typer.Option(help="the JSON (default: PREFIX.histogram.json); the plot is put beside it")
    ] = None,
    share: Annotated[float, typer.Option(help="share of the vocabulary whose part of all labels is printed")] = 0.02,
    vocab_size: Annotated[
        int, typer.Option(show_default=False, help="(default: the manifest's, else the largest id plus one)")
    ] = 0,
) -> None:
    """Count the labels of a set: how much of the text the most frequent tokens are (the paper's Figure 2a)."""
    with one_sentence(stopped=_STOPPED):
        from simreg_megatron.data.histogram import count_labels
        from simreg_megatron.data.indexed import DataError
        from simreg_megatron.report.labels import draw_label_histogram

        path = output or Path(f"{prefix}.histogram.json")
        if path.suffix == ".png":
            raise DataError(f"--output names the JSON, and {path} is the name of the plot beside it: end it in .json")
        labels = count_labels(prefix, vocab_size=vocab_size or None)
        path.write_text(json.dumps(labels.as_dict(share)) + "\n")
        plot = draw_label_histogram(labels.counts, path.with_suffix(".png"), share=share, title=prefix.name)
        print(labels.sentence(share))
        print(f"{path}, {plot}")


def _say(sentence: str) -> None:
    print(f"> {one_line(sentence)}", flush=True)


def _summarize(manifest: dict[str, Any], out: Path) -> None:
    from simreg_megatron.data.assemble import MANIFEST

    for side, count in manifest["tokens"].items():
        if count:
            print(f"{out / side}: {count:,} tokens, {manifest['documents'][side]:,} documents, {manifest['dtype']}")
        asked = manifest["budget"][side]
        if asked is not None and count < asked:
            print(f"notice: that is all there is; {asked:,} tokens were asked for")
    share, documents = manifest["settings"].get("valid_share"), manifest["documents"]["train"]
    if share and not manifest["tokens"]["valid"]:
        print(
            f"notice: there is no validation set, since --valid-share {share:g} chose none of {documents:,} documents: "
            "give --valid SOURCE or a larger --valid-share with another --out, or train without --valid-data"
        )
    read = manifest.get("read", {})
    for name, many in (("empty", "empty documents kept without a token"), ("skipped", "broken records left out")):
        if read.get(name):
            print(f"{read[name]:,} {many}" + (f", the first: {read['skipped_where'][0]}" if name == "skipped" else ""))
    print(f"{out / MANIFEST} tells the rest.")


def _number(text: str, name: str, *, unit: int = 1000) -> int | None:
    """20B, 1.5B, 4096, 1_000_000 or 1,000,000."""
    from simreg_megatron.data.indexed import DataError

    if not text:
        return None
    found = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|[\d_]*\d(?:\.\d+)?)([KMGBT]?)", text, re.IGNORECASE)
    if found is None:
        raise DataError(f"--{name} takes a number such as 20B, 500M or 4096, not {text!r}")
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
    return round(float(found[1].replace(",", "").replace("_", "")) * unit ** powers[found[2].upper()])


def _block_bytes(text: str) -> int:
    from simreg_megatron.data.indexed import DataError

    size = _number(text, "block-size", unit=1 << 10) or 0
    if size < _SMALLEST_BLOCK:
        raise DataError(f"--block-size takes 64K or more, not {text!r}: each part is a file")
    return size


def _shard(text: str) -> tuple[int, int]:
    from simreg_megatron.data.indexed import DataError

    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise DataError(f"--shard takes I/N with I from 1 to N, such as 3/8, not {text!r}")
    return int(found[1]) - 1, int(found[2])
