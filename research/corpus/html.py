# SPDX-License-Identifier: Apache-2.0
"""HTML as pieces: marks go around the elements that stand alone, and all text is then taken at once."""

from __future__ import annotations

import re
from typing import Any

from lxml import etree, html

from research.corpus.prose import Piece

_BREAK, _TITLE = "\ue000", "\ue001"  # private characters: no text has them
_DROPPED = (
    "script", "style", "noscript", "nav", "header", "footer", "aside", "form", "button", "select", "textarea", "pre",
    "svg", "math", "object", "iframe",
)  # fmt: skip
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_STANDING = (
    "address", "article", "blockquote", "body", "br", "caption", "center", "dd", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "hr", "li", "main", "ol", "p", "section", "table", "tbody", "td", "tfoot", "th", "thead",
    "tr", "ul",
)  # fmt: skip
_XML_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")  # lxml takes no str that has one


def read_html(text: str) -> list[Piece]:
    """Headings, and what stands between any two breaks of the page, without navigation and listings."""
    try:
        tree = html.document_fromstring(_XML_DECLARATION.sub("", text))
    except (etree.ParserError, etree.XMLSyntaxError, ValueError):
        return []
    head = tree.find("head")
    if head is not None:
        tree.remove(head)
    for navigation in tree.xpath("//*[@role='navigation']"):
        if navigation.getparent() is not None:
            navigation.drop_tree()
    return _pieces_of(tree)


def _pieces_of(tree: Any) -> list[Piece]:
    etree.strip_elements(tree, etree.Comment, etree.ProcessingInstruction, *_DROPPED, with_tail=False)
    for element in tree.iter(*_HEADINGS, *_STANDING):
        mark = _TITLE if element.tag in _HEADINGS else _BREAK
        element.text = f"{mark}{element.text or ''}"
        element.tail = f"{_BREAK}{element.tail or ''}"
    text = "".join(tree.itertext()).replace(_TITLE, _BREAK + _TITLE)
    return [
        Piece(piece.removeprefix(_TITLE), piece.startswith(_TITLE))
        for piece in text.split(_BREAK)
        if piece and not piece.isspace()
    ]
