# SPDX-License-Identifier: Apache-2.0
"""Tokenizers as the preparation of data uses them: many texts at once, no special tokens of their own.

`describe_tokenizer` says what a tokenizer is, in what goes to a manifest; `Encoder` is made from that in each worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import DataError, PairWriter, sha256, token_dtype
from simreg_megatron.data.linewise import cuts_at_lines, encode_by_lines

RECORD = "tokenizer_hash.json"  # in the record of a run's start: which tokenizer it trains with
SENTENCEPIECE, HUGGING_FACE = "sentencepiece", "huggingface"
_GIVE = "give the .model file that the data, or the model, was made with"
MOST_IDS = 1 << 21  # more than any vocabulary has: a larger one is a damaged number
# Its ids tell tokenizers apart that have the same vocabulary: cases, digits, spaces, other scripts, bytes.
_PROBE = (
    "The 1234 quick  brown\tfoxes' jumps,\n\n  don't_stop CamelCase http://a.b/c?d=e "
    "na\u00efve \u00dcbergr\u00f6\u00dfe \u6771\u4eac \u3072\u3089\u304c\u306a \u0000 \U0001f98a."
)


_ASIDE = ("source", "backend", "cuts_special")


@dataclass(frozen=True)
class TokenizerFacts:
    """What a data set depends on; `source` is where the tokenizer was loaded from, `backend` what workers load."""

    kind: str
    source: str
    sha256: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    backend: str = field(default="", repr=False)
    cuts_special: bool = field(default=False, repr=False)  # names of special tokens in a text; not told by `backend`

    @property
    def dtype(self) -> str:
        return token_dtype(self.vocab_size)

    def identity(self) -> dict[str, Any]:
        """What decides; the same tokenizer may lie elsewhere."""
        return {name: value for name, value in asdict(self).items() if name not in _ASIDE}

    def record(self) -> dict[str, Any]:
        """What tells later whether another tokenizer is this one."""
        return {name: getattr(self, name) for name in ("kind", "source", "sha256", "vocab_size")}

    @property
    def name(self) -> str:
        return Path(self.source).name


def describe_tokenizer(source: str) -> TokenizerFacts:
    """Facts of a sentencepiece `.model` file, or of a Hugging Face folder or name.

    Raises:
        DataError: it is not there, or has no end-of-text token.
    """
    if source.endswith(".model"):
        return _describe_sentencepiece(source)
    tokenizer = load_hugging_face(source)
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id  # as Megatron
    if eos is None:
        raise DataError(f"the tokenizer {source} has no end-of-text token: name its eos_token in tokenizer_config.json")
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    _refuse_ids_beyond_reason(source, vocabulary[-1][1] if vocabulary else 0)
    refuse_holes(tokenizer, source)
    probe = tokenizer(_PROBE, add_special_tokens=False).input_ids
    digest = hashlib.sha256(json.dumps([vocabulary, probe, eos, bos]).encode()).hexdigest()
    return TokenizerFacts(HUGGING_FACE, source, digest, len(tokenizer), eos, bos, *_backend_of(tokenizer))


def refuse_holes(tokenizer: Any, source: str | Path) -> None:
    """Megatron makes a model of as many rows as a tokenizer has tokens.

    Raises:
        DataError: some of its tokens have larger numbers.
    """
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= len(tokenizer):
        raise DataError(
            f"the tokenizer {source} has {len(tokenizer):,} tokens and gives one of them the number {largest:,}, for "
            "which a model of that many has no row: fill the gaps of its vocabulary with unused tokens"
        )


def _backend_of(tokenizer: Any) -> tuple[str, bool]:
    """The fast tokenizer alone, as JSON, without a limit of length or a wrapper that takes seconds to load; and whether
    it cuts the names of special tokens as any other text."""
    if not tokenizer.is_fast:
        return "", False
    fast = tokenizer.backend_tokenizer
    fast.no_truncation()
    fast.no_padding()
    return str(fast.to_str()), bool(getattr(tokenizer, "split_special_tokens", False))


def _describe_sentencepiece(source: str) -> TokenizerFacts:
    model = load_sentencepiece(source)
    if model.eos_id() < 0:
        raise DataError(f"the tokenizer {source} has no end-of-text token, so documents could not be told apart")
    bos = model.bos_id() if model.bos_id() >= 0 else None
    return TokenizerFacts(SENTENCEPIECE, source, sha256(Path(source)), model.get_piece_size(), model.eos_id(), bos)


def load_sentencepiece(source: str) -> Any:
    """The processor of a `.model` file.

    Raises:
        DataError: there is no such file, or it is empty or damaged; or the library is missing.
    """
    try:
        import sentencepiece
    except ImportError:
        raise DataError("sentencepiece is needed for a .model tokenizer: pip install sentencepiece") from None
    path = Path(source)
    if not path.is_file() or path.stat().st_size == 0:
        state = "is empty" if path.is_file() else "does not exist"
        raise DataError(f"the tokenizer {source} {state}: {_GIVE}")
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=source)
        model.id_to_piece(list(range(model.vocab_size())))  # see that all of them are text
        return model
    except (RuntimeError, OSError, ValueError):  # ValueError: of pieces that are no text
        raise DataError(f"{source} is not a sentencepiece model: {_GIVE}") from None


def load_hugging_face(source: str) -> Any:
    """The tokenizer of a folder, or of a name on the Hub, without running code of its own.

    Raises:
        DataError: there is none, it is damaged, or it needs such code.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError("a Hugging Face tokenizer needs the transformers library: pip install transformers") from None
    if Path(source).is_file():
        raise DataError(
            f"{source} is a file, but not a .model: give a sentencepiece .model, or a Hugging Face folder or name"
        )
    if not Path(source).is_dir() and (Path(source).is_absolute() or source.startswith(".")):
        raise DataError(f"there is no tokenizer folder {source}: give one, a sentencepiece .model file, or a name")
    _refuse_ids_beyond_reason(source, _largest_id(Path(source) / "tokenizer.json"))
    with _panics_told(source):
        try:
            local = Path(source).is_dir()  # of a folder nothing is fetched, whatever its settings name
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
            tokenizer(_PROBE, add_special_tokens=False)  # settings of a wrong kind are used here for the first time
            return tokenizer
        except Exception as error:  # OSError, ValueError, KeyError and the Hub's own
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{source} cannot be loaded as a tokenizer ({type(error).__name__}: {reason})") from None


def _largest_id(path: Path) -> int:
    """Before transformers loads the file: version 5.0 prints every id that is left free below the largest."""
    from tokenizers import Tokenizer

    with _panics_told(str(path.parent)):
        try:
            return max(Tokenizer.from_file(str(path)).get_vocab().values(), default=0)
        except Exception:  # there is no such file, or transformers will say what is wrong with it
            return 0


@contextmanager
def _panics_told(source: str) -> Iterator[None]:
    """Where tokenizers' Rust gives up, it raises what is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the tokenizer {source} makes its library fail ({error}): get it again") from None


def _refuse_ids_beyond_reason(source: str, largest: int) -> None:
    if largest > MOST_IDS:
        raise DataError(f"the tokenizer {source} gives a piece the id {largest}: its file is damaged, get it again")


class Encoder:
    """Turns texts into ids, on one thread.

    Args:
        facts: from `describe_tokenizer`; a worker must find the same source.
    """

    def __init__(self, facts: TokenizerFacts) -> None:
        self._source = facts.source
        if facts.kind == SENTENCEPIECE:
            model = load_sentencepiece(facts.source)
            if cuts_at_lines(model):
                self._encode = lambda texts: encode_by_lines(model, texts)
            else:
                self._encode = lambda texts: model.encode(texts, num_threads=1)
        elif facts.backend:
            from tokenizers import Tokenizer

            with _panics_told(facts.source):
                try:
                    fast = Tokenizer.from_str(facts.backend)
                except Exception as error:  # the library has no class of its own
                    raise DataError(
                        f"{facts.source} cannot be loaded as a fast tokenizer ({error}): get it again"
                    ) from None
            if facts.cuts_special:
                fast.encode_special_tokens = True
            # Without offsets, and without the wrapper's dictionaries of masks.
            self._encode = lambda texts: [one.ids for one in fast.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            slow = load_hugging_face(facts.source)
            self._encode = lambda texts: slow(texts, add_special_tokens=False).input_ids

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around them."""
        with _panics_told(self._source):
            return self._encode(list(texts)) if texts else []


def write_dataset(prefix: Path, documents: Iterable[str], tokenizer: str | Path) -> tuple[int, int]:
    """A few documents at once into `prefix`.bin and .idx; end-of-text closes each, nothing opens it.

    Returns:
        The number of documents and of tokens.
    """
    import numpy as np

    facts = describe_tokenizer(str(tokenizer))
    writer = PairWriter(prefix, facts.dtype)
    for ids in Encoder(facts).encode(list(documents)):
        ids.append(facts.eos_id)
        writer.append(np.asarray(ids), np.asarray([len(ids)]))
    writer.commit()
    return writer.num_documents, writer.num_tokens
