# SPDX-License-Identifier: Apache-2.0
"""The tokenizer beside an exported model: a Hugging Face one is copied, a sentencepiece model converted and compared.

Neither adds a token of its own where training added none: the exported tokenizer gives the ids that training saw.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.data.encoding import load_hugging_face, load_sentencepiece, refuse_holes
from simreg_megatron.data.indexed import DataError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_SPACE = "\u2581"  # sentencepiece's sign for a space
_SAMPLES = (
    "Hello, world! The quick brown fox jumps over the lazy dog; 3.14159 is close to 22/7.",
    "  leading and  double spaces, a tab\tand a trailing one ",
    "def f(x):\n    return [x ** 2, {'a': \"b\"}]  # code\n\n\nend",
    "\u00fcn\u00efc\u00f6d\u00e9 \u6f22\u5b57 \U0001f600 \u00a0non-breaking",
    "<s> </s> <unk> as plain text",
    "a",
)


@dataclass(frozen=True)
class Tokenizer:
    """What the configuration needs to know of a tokenizer, and how it gets into a folder.

    Attributes:
        path: the folder or sentencepiece model that it comes from.
        size: its number of tokens.
        bos: the id that begins a text, if there is one.
        eos: the id that ends a text.
    """

    path: Path
    size: int
    bos: int | None
    eos: int | None

    def write(self, folder: Path) -> None:
        if self.path.is_dir():
            for name in _FILES:
                if (self.path / name).is_file():
                    shutil.copyfile(self.path / name, folder / name)
        else:
            _converted(self.path, folder)

    def encode(self, text: str) -> list[int]:
        if self.path.is_dir():
            return list(_hugging_face(self.path)(text, add_special_tokens=False)["input_ids"])
        return list(_sentencepiece(self.path).encode(text))


def open_tokenizer(path: Path) -> Tokenizer:
    """A folder with a Hugging Face tokenizer, or a sentencepiece .model file.

    Raises:
        CheckpointError: it is neither; or it needs code of its own, which is not run.
    """
    if path.is_dir():
        if not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            if (path / "tokenizer.model").is_file():
                if (path / "added_tokens.json").is_file():
                    raise CheckpointError(
                        f"{path} adds tokens (added_tokens.json) to its tokenizer.model, and they would be lost: load "
                        "and save it with transformers, and give the folder with the tokenizer.json that this writes"
                    )
                return open_tokenizer(path / "tokenizer.model")
            raise CheckpointError(f"{path} holds no tokenizer: give a folder with tokenizer.json, or a .model file")
        found = _hugging_face(path)
        _loaded(functools.partial(refuse_holes, found), path)
        return Tokenizer(path, len(found), found.bos_token_id, found.eos_token_id)
    model = _sentencepiece(path)
    return Tokenizer(path, model.vocab_size(), _or_none(model.bos_id()), _or_none(model.eos_id()))


def _or_none(number: int) -> int | None:
    return None if number < 0 else number


def _hugging_face(path: Path) -> Any:
    return _loaded(load_hugging_face, path)


def _sentencepiece(path: Path) -> Any:
    return _loaded(load_sentencepiece, path)


def _loaded(load: Callable[[str], Any], path: Path) -> Any:
    try:
        return load(str(path))
    except DataError as error:
        raise CheckpointError(str(error)) from None


def _converted(path: Path, folder: Path) -> None:
    """Write a sentencepiece byte-pair model as tokenizer.json, and see that both cut texts the same."""
    import transformers

    model = _sentencepiece(path)
    try:
        fast = _fast_tokenizer(model, path)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged model raises whatever its pieces happen to ask for
        raise CheckpointError(
            f"{path} cannot be converted ({type(error).__name__}: {error}): give the one the model was trained with, "
            "or convert it yourself and give the folder with its tokenizer.json"
        ) from None
    special = {
        name: model.id_to_piece(number)
        for name, number in (
            ("bos_token", model.bos_id()),
            ("eos_token", model.eos_id()),
            ("unk_token", model.unk_id()),
        )
        if number >= 0
    }
    # Where a text says "</s>", sentencepiece finds letters: only training ends documents.
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, clean_up_tokenization_spaces=False, add_bos_token=False, split_special_tokens=True,
        **special,
    )  # fmt: skip
    wrapped.save_pretrained(str(folder))
    config = folder / "tokenizer_config.json"
    entries = json.loads(config.read_text())
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that releases 4 and 5 of transformers know
    entries["add_bos_token"] = False
    config.write_text(json.dumps(entries, indent=2) + "\n")
    _refuse_others(path, model, folder)
    shutil.copyfile(path, folder / "tokenizer.model")


def _refuse_others(path: Path, model: Any, folder: Path) -> None:
    """See that what was written cuts texts as the model does, once it is loaded as users load it."""
    # Every piece between letters, too: a symbol that its user defined is cut out before pairs are merged.
    pieces = [f"a{model.id_to_piece(number)}b".replace(_SPACE, " ") for number in range(model.vocab_size())]
    texts = [*_SAMPLES, *pieces]
    if _hugging_face(folder)(texts, add_special_tokens=False)["input_ids"] != model.encode(texts):
        raise CheckpointError(
            f"{path} cuts text in a way that could not be converted exactly: convert it yourself and give the "
            "folder with its tokenizer.json"
        )


def _fast_tokenizer(model: Any, path: Path) -> Any:
    """Merges are the pairs of pieces that make a piece, in the order in which the pieces were learned."""
    import tokenizers
    from tokenizers import decoders, normalizers

    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    learned = [
        number
        for number in range(len(pieces))
        if not (model.is_control(number) or model.is_unknown(number) or model.is_byte(number))
    ]
    scores = [model.get_score(number) for number in learned]
    if any(score != round(score) for score in scores) or scores != sorted(scores, reverse=True):
        raise CheckpointError(
            f"{path} is no byte-pair model: convert it yourself and give the folder with its tokenizer.json"
        )
    known = {pieces[number] for number in learned}
    merges = []
    for number in learned:
        piece = pieces[number]
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        cuts = [(left, right) for left, right in cuts if left in known and right in known]
        merges.extend(sorted(cuts, key=lambda cut: (numbers[cut[0]], numbers[cut[1]])))
    has_bytes = any(model.is_byte(number) for number in range(len(pieces)))
    found = tokenizers.Tokenizer(
        tokenizers.models.BPE(numbers, merges, unk_token=pieces[model.unk_id()], fuse_unk=True, byte_fallback=has_bytes)
    )
    prefixed = model.encode("a", out_type=str)[0].startswith(_SPACE)
    steps = [normalizers.Prepend(_SPACE)] if prefixed else []
    found.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    found.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return found
