# SPDX-License-Identifier: Apache-2.0
"""The ids of a sentencepiece byte-pair model, line by line: the same as of the whole text, and sooner.

A text's pairs are merged in the order of their rank over its whole length, so long texts cost more than their parts.
Where no piece of the vocabulary holds a line break, no merge crosses one, and each line can be merged by itself; this
is so for LLaMA-2's model and for those trained here. (A cache of words, exact where no piece crosses a space, was tried
as well: it gains no more, because every tenth word is new.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SPACE = "\u2581"  # what stands for a space in pieces


def cuts_at_lines(model: Any) -> bool:
    """Whether the ids of a text are those of its lines, for certain: in doubt, no."""
    try:
        from sentencepiece import sentencepiece_model_pb2

        schema: Any = sentencepiece_model_pb2  # its classes are made when it is imported
        proto = schema.ModelProto.FromString(model.serialized_model_proto())
        crosses = any("\n" in piece.piece for piece in proto.pieces)
    except Exception:  # no protobuf here, or one that cannot read this
        return False
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    plain = not normalizer.precompiled_charsmap and not normalizer.remove_extra_whitespaces
    prefix = normalizer.add_dummy_prefix and normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix
    pairs = trainer.model_type == schema.TrainerSpec.BPE and trainer.byte_fallback  # bytes: unknowns do not join
    if not (plain and prefix and pairs) or model.piece_to_id(_SPACE) == model.unk_id():
        return False
    return not crosses


def encode_by_lines(model: Any, texts: Sequence[str]) -> list[list[int]]:
    """As the model's own encode of the texts, if `cuts_at_lines`."""
    lines: list[str] = []
    counts = []
    for text in texts:
        first, *others = text.split("\n")
        lines.append(first)
        lines += ["\n" + line for line in others]
        counts.append(1 + len(others))
    encoded = iter(model.encode(lines, num_threads=1))
    found = []
    for count in counts:
        ids = next(encoded)
        for _ in range(count - 1):
            more = next(encoded)
            ids += more[1:] if ids else more  # the model puts a space before each: only the text's first is its own
        found.append(ids)
    return found
