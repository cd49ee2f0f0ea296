# SPDX-License-Identifier: Apache-2.0
"""Text with little markup as pieces: reStructuredText, AsciiDoc, Markdown, POD, dictionaries, WordNet, none at all.

One reader is enough for the first three: what is left of their markup in a paragraph is taken off, and what is no
paragraph holds no sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from research.corpus.prose import SHORTEST, Piece

_RULE = re.compile(r"([-=~^\"'`#*+.:_])\1{2,}$")
_BULLETS = ("* ", "- ", "+ ")
_MARKDOWN = re.compile(r"\[([^]]*)\]\([^)]*\)|[*`]{1,3}(?=\S)|(?<=\S)[*`]{1,3}")
_ROLE = re.compile(r":[\w:.+-]+:`[!~]?([^`<]*?)\s*(?:<[^`]*>)?`|`+([^`<]*?)\s*(?:<[^`]*>)?`+_{0,2}")
_PARAGRAPH_NUMBER = re.compile(r"^\d+(?:\.\w+)?(?:/\d+)?\s+(?:\* )?(?=[A-Z{])|\{AI[^}]*\}\s*")  # of standards
_POD_CODE = re.compile(r"[A-Z]<<* ?([^<>]*?) ?>>*")
_POD_CHARACTERS = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}
_SOURCE = re.compile(
    r"\s*\[(?:1913 Webster|Webster 1913 Suppl\.|WordNet [\d.]+|PJC|RDH|Century Dict[^]]*|\w+ ?\+PJC)\]"
)


def read_text(text: str) -> Iterator[Piece]:
    """Paragraphs, which end at a blank line or an item of a list, and headings that are underlined or marked."""
    lines: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        if len(bare) < 2:  # also the percent sign between fortunes, and AsciiDoc's plus
            yield from close_paragraph(lines)
        elif bare.startswith("#"):
            yield from close_paragraph(lines)
            yield Piece(bare.strip("# "), True)
        elif _RULE.match(bare):
            yield from (Piece(piece.text, True) for piece in close_paragraph(lines))
        elif not bare.startswith((".. ", "[[", ":")):
            if bare.startswith(_BULLETS):
                yield from close_paragraph(lines)
            lines.append(bare.lstrip("*-+|> "))
    yield from close_paragraph(lines)


def close_paragraph(lines: list[str]) -> Iterator[Piece]:
    """Yield the lines as one piece without marks, if there are any, and empty the list."""
    if lines:
        text = _ROLE.sub(lambda match: match[1] or match[2] or "", " ".join(lines))
        yield Piece(_PARAGRAPH_NUMBER.sub("", _MARKDOWN.sub(lambda match: match[1] or "", text)))
        lines.clear()


def read_dictionary(text: str) -> Iterator[Piece]:
    """Definitions, each below its word where that stands on a line of its own."""
    for piece in read_text(_SOURCE.sub("", text)):
        plain = piece.text.replace("{", "").replace("}", "")
        yield Piece(plain, is_heading=len(plain) < SHORTEST and plain[-1:].isalnum())


def read_pod(text: str) -> Iterator[Piece]:
    """Headings and paragraphs; what is indented is a listing."""
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("=head"):
            yield Piece(_unpod(paragraph.partition(" ")[2]), True)
        elif paragraph and not paragraph[0].isspace() and not paragraph.startswith("="):
            yield Piece(_unpod(paragraph))


def _unpod(text: str) -> str:
    for _ in range(3):  # codes stand within codes
        text = _POD_CODE.sub(lambda match: _POD_CHARACTERS.get(match[1], match[1].split("|")[0]), text)
    return text


def read_wordnet(text: str) -> Iterator[Piece]:
    """Read sets of synonyms, one a line, whose gloss comes after a bar."""
    for line in text.splitlines():
        fields, _, gloss = line.partition(" | ")
        if gloss and not line.startswith(" "):
            parts = fields.split()
            words = parts[4 : 4 + 2 * int(parts[3], 16) : 2]
            yield Piece(f"{', '.join(words).replace('_', ' ')}: {gloss.strip().rstrip('.')}.")
