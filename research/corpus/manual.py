# SPDX-License-Identifier: Apache-2.0
"""Manual pages as pieces: as much of roff, with the macros man and mdoc, as their sentences need.

A request begins with a dot. Some break the paragraph, some open a listing or a definition, some say nothing to the
reader; every other one gives its arguments to the sentence, as `.B word` and `.Ar file` do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from research.corpus.plain import close_paragraph
from research.corpus.prose import Piece

_REQUEST = re.compile(r"^[.'][ \t]*([A-Za-z]\w?)?[ \t]*(.*)$")
_HEADINGS = ("SH", "SS", "Sh", "Ss")
_LISTING, _LISTING_END = ("nf", "EX", "Vb", "Bd"), ("fi", "EE", "Ve", "Ed")
_DEFINITION = ("de", "am", "ig")
_BREAKING = "PP LP P TP IP HP RS RE Pp It Bl El sp br Bd Ed TQ SH SS Sh Ss nf fi EX EE"
_SAYING_NOTHING = "TH Dd Dt Os ds nr if ie el ft ad na hy nh ne in ti ta so tr rm rn ce Ve Vb"
_BREAKS = frozenset(_BREAKING.split())
_SILENT = _BREAKS | frozenset(_SAYING_NOTHING.split())
_ESCAPES = re.compile(r"\\(?:f(?:\[[^]]*\]|\(..|.)|s[+-]?\d+|[&|^%:/,]|m\[[^]]*\])")
_NAMED = re.compile(r"\\(?:\((..)|\[([^]]+)\])")
_CHARACTERS = {
    "aq": "'", "cq": "'", "oq": "'", "dq": '"', "lq": '"', "rq": '"', "em": " - ", "en": "-", "mi": "-", "bu": "",
    "co": "(c)", "ha": "^", "ti": "~", "rs": "\\",
}  # fmt: skip


def read_manual(text: str) -> Iterator[Piece]:
    """Headings and paragraphs, without listings."""
    lines: list[str] = []
    listing = definition = False
    for line in text.splitlines():
        request = _REQUEST.match(line)
        if definition:
            definition = not line.startswith("..")
        elif request is None:
            if not line.strip():
                yield from close_paragraph(lines)
            elif not listing:
                lines.append(_plain(line))
        else:
            name, arguments = request[1] or "", request[2]
            if name in _BREAKS:
                yield from close_paragraph(lines)
            if name in _HEADINGS:
                yield Piece(_plain(arguments).strip('" ').capitalize(), True)
            elif name and not listing and name not in _SILENT and name not in _DEFINITION:
                lines += [_plain(arguments.replace('"', ""))] if not arguments.startswith('\\"') else []
            listing = (listing or name in _LISTING) and name not in _LISTING_END
            definition = name in _DEFINITION
    yield from close_paragraph(lines)


def _plain(line: str) -> str:
    line = _NAMED.sub(lambda match: _CHARACTERS.get(match[1] or match[2], ""), _ESCAPES.sub("", line))
    return line.split('\\"')[0].replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace("\\", "")
