# SPDX-License-Identifier: Apache-2.0
"""Whether a vocabulary is that of training: its size against the rows that Megatron padded, its tokenizer by its hash.

A model exported with another tokenizer loads, computes and even agrees with Megatron on the rows that it kept; only
its text is nonsense. So what does not fit is refused, and what nobody can tell is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from simreg_megatron.checkpoint.architecture import LARGEST
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.tokenizer import Tokenizer
from simreg_megatron.data.encoding import RECORD, TokenizerFacts, describe_tokenizer
from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.settings import read_json
from simreg_megatron.sentences import brief

_ADDED_BY_MEGATRON = 7  # <CLS>, <SEP>, <EOD>, <MASK>, <PAD>, <BOS>, <EOS>, by its sentencepiece tokenizer up to 0.15
_SIZED_BY_ARGUMENT = (None, "TikTokenizer")  # None: imported; NullTokenizer's end of text counted or not, by release
_WAY_OUT = "or leave out --tokenizer and --vocab-size, and all rows are kept"


def check_size(args: Mapping[str, Any], size: int, num_rows: int, what: str) -> None:
    """See that Megatron would have padded `size` tokens to the rows of the checkpoint.

    Args:
        args: the checkpoint's; where they do not tell how rows were padded, any size up to `num_rows` may be right.
        what: begins the sentence and names where the size comes from.

    Raises:
        CheckpointError: it would not have.
    """
    multiple = _padded_to(args)
    added_tokens = _added_tokens(args, num_rows)
    fitting = {-(-(size + added) // multiple) * multiple for added in added_tokens} if multiple else {num_rows}
    if size > num_rows or num_rows not in fitting:
        padded = f", which Megatron pads to {min(fitting)} rows" if multiple else ""
        raise CheckpointError(
            f"{what} stands for {size} tokens{padded}, and the checkpoint has {num_rows} rows: give the tokenizer of "
            f"training{_named(args)}, {_WAY_OUT}"
        )


def size_of(args: Mapping[str, Any], tokenizer: Tokenizer | None, num_rows: int) -> int | None:
    """How many tokens are real, as far as the checkpoint and its tokenizer tell.

    A checkpoint that does not say how it was padded was imported, and a Hugging Face model may have more rows than its
    tokenizer has tokens. Most tokenizers of Megatron's pass over --vocab-size, whatever it says.
    """
    recorded = args.get("vocab_size")
    if tokenizer is not None:
        is_wider = _padded_to(args) is None and isinstance(recorded, int) and recorded > tokenizer.size
        return recorded if is_wider else tokenizer.size
    if isinstance(recorded, int) and args.get("tokenizer_type") in _SIZED_BY_ARGUMENT:
        with suppress(CheckpointError):
            check_size(args, recorded, num_rows, "it")
            return recorded
    return None


def _padded_to(args: Mapping[str, Any]) -> int | None:
    factors = [args.get(name) for name in ("make_vocab_size_divisible_by", "tensor_model_parallel_size")]
    if not all(isinstance(factor, int) and 0 < factor < LARGEST for factor in factors):
        return None
    return int(factors[0] * factors[1])  # type: ignore[operator]


def _added_tokens(args: Mapping[str, Any], num_rows: int) -> range:
    """How many tokens Megatron may have put behind those of the tokenizer's own file, of which there is a row each."""
    if "SentencePiece" not in brief(args.get("tokenizer_type")):
        return range(1)
    extra = args.get("vocab_extra_ids")
    return range(_ADDED_BY_MEGATRON + (extra if isinstance(extra, int) and 0 < extra < num_rows else 0) + 1)


def _named(args: Mapping[str, Any]) -> str:
    name = args.get("tokenizer_model")
    return f" ({name})" if isinstance(name, str) else ""


def check_tokenizer(args: Mapping[str, Any], checkpoint: Path, tokenizer: Tokenizer) -> list[str]:
    """See that a tokenizer is the one of training, by the record of the run, or by the file that training named.

    Returns:
        A line for the user where neither is there.

    Raises:
        CheckpointError: it is another one.
    """
    trained = _recorded(checkpoint) or _still_there(args)
    given = _facts(tokenizer.path)
    if not trained or given is None:
        return [f"nothing shows whether {tokenizer.path} is the tokenizer of training{_named(args)}: no hash of it "
                "was recorded, and it is not here"]  # fmt: skip
    if any(given.sha256 == one["sha256"] for one in trained):
        return []
    alike = [one for one in trained if one["kind"] == given.kind]
    if not alike and any(one["vocab_size"] == given.vocab_size for one in trained):
        return [f"{tokenizer.path} is of another form than the tokenizer of training ({trained[-1]['source']}) and as "
                "large: whether both cut text the same was not compared"]  # fmt: skip
    raise CheckpointError(
        f"{tokenizer.path} is not the tokenizer of training, {trained[-1]['source']}: its hash is {given.sha256[:12]} "
        f"and not {trained[-1]['sha256'][:12]}; give that one, {_WAY_OUT}"
    )


def _recorded(checkpoint: Path) -> list[dict[str, Any]]:
    """What each start of the run wrote down (launch/record.py), oldest first: OUTPUT/checkpoints/iter_... is below."""
    folder = checkpoint.absolute()
    for base in (folder.parent.parent, folder.parent, folder):
        found = []
        for path in sorted((base / "record").glob(f"*/{RECORD}")):
            with suppress(DataError, KeyError, TypeError):  # damaged, or of another program
                entries = read_json(path) or {}
                found.append({name: entries[name] for name in ("kind", "source", "sha256", "vocab_size")})
        if found:
            return found
    return []


def _still_there(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    name = args.get("tokenizer_model")
    facts = _facts(Path(name)) if isinstance(name, str) and Path(name).exists() else None
    return [facts.record()] if facts else []


def _facts(path: Path) -> TokenizerFacts | None:
    """None for a tokenizer without an end of text, which nothing of ours trains with."""
    with suppress(DataError):
        return describe_tokenizer(str(path))
    return None
