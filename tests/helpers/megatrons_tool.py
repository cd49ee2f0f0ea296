# SPDX-License-Identifier: Apache-2.0
"""What Megatron's own tools/preprocess_data.py writes: run where its source tree is, remembered where it is not.

`python -m tests.helpers.megatrons_tool TREE TAG` writes the checksums in megatrons_tool.json anew, from the tree of
that tag. Texts and tokenizers are made here, piece by piece and with nothing trained, so they are the same everywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from simreg_megatron.installed import python_path
from tests.helpers.preparation import TEXTS, lines, save_hugging_face

REMEMBERED = Path(__file__).with_suffix(".json")
TEXTS_REMEMBERED = TEXTS[:40]  # one is empty, some have other scripts
ENDINGS = (".bin", ".idx")
KINDS = {  # flags, and what they are in `data prepare --bos`
    "sentencepiece": (("--tokenizer-type", "SentencePieceTokenizer"), "none"),
    "huggingface": (("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-hf-no-include-special-tokens"), "none"),
    "huggingface as it is": (("--tokenizer-type", "HuggingFaceTokenizer"), "document"),  # its template opens with <s>
}
_MERGES = (("w", "o"), ("r", "d"), ("wo", "rd"), ("T", "e"), ("x", "t"), ("Te", "xt"), ("1", "2"), ("n", "a"))


def written_by(tree: Path, kind: str, tokenizer: Path, texts: list[str], folder: Path) -> dict[str, bytes]:
    """The tool's files for these texts, by ending."""
    (folder / "text.jsonl").write_bytes(lines(texts))
    words = command(tree, kind, tokenizer, folder)
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": python_path(tree)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {ending: (folder / f"megatron_text_document{ending}").read_bytes() for ending in ENDINGS}


def command(tree: Path, kind: str, tokenizer: Path, folder: Path) -> list[str]:
    return [
        *(sys.executable, str(tree / "tools" / "preprocess_data.py"), "--input", str(folder / "text.jsonl")),
        *("--output-prefix", str(folder / "megatron"), "--append-eod", "--workers", "1"),
        *("--tokenizer-model", str(tokenizer), *KINDS[kind][0]),
    ]


def make_tokenizer(kind: str, folder: Path) -> Path:
    """A tokenizer of characters, bytes and a few words, always the same."""
    return _sentencepiece(folder / "tokenizer.model") if kind == "sentencepiece" else _hugging_face(folder / "face")


def _sentencepiece(path: Path) -> Path:
    from sentencepiece import sentencepiece_model_pb2 as definition

    model = definition.ModelProto()
    kind = definition.ModelProto.SentencePiece
    characters = sorted({"\u2581"} | {character for text in TEXTS for character in text if "!" <= character < "\x7f"})
    pieces = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
    pieces += [(text, kind.NORMAL) for text in (*(a + b for a, b in _MERGES), "\u2581word", *characters)]
    for rank, (piece, what) in enumerate(pieces):
        model.pieces.add(piece=piece, score=-rank if what == kind.NORMAL else 0, type=what)
    model.trainer_spec.model_type = definition.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(pieces)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _hugging_face(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in _MERGES)]
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", "</s>"])
    return save_hugging_face(backend, path)


def checksums(files: dict[str, bytes]) -> dict[str, str]:
    return {ending: hashlib.sha256(data).hexdigest() for ending, data in files.items()}


def main() -> None:
    tree, tag = Path(sys.argv[1]).absolute(), sys.argv[2]
    found, commands = {}, {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tokenizer = make_tokenizer(kind, folder)
            found[kind] = checksums(written_by(tree, kind, tokenizer, TEXTS_REMEMBERED, folder))
            words = command(Path("TREE"), kind, tokenizer.relative_to(folder), Path())
        commands[kind] = " ".join(["python", *words[1:]])
    packages = ("torch", "numpy", "sentencepiece", "tokenizers", "transformers")
    origin = {
        "tool": f"Megatron-LM {tag}, tools/preprocess_data.py",
        "commands": commands,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    REMEMBERED.write_text(json.dumps({"origin": origin, "sha256": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
