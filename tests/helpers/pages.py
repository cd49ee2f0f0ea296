# SPDX-License-Identifier: Apache-2.0
"""Contents of the project's Markdown pages, as GitHub reads them: links, headings, blocks of code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md"), *ROOT.glob("launch/**/*.md")])

_FENCE = re.compile(r"^(?P<mark>```+)(?P<language>\S*)[ \t]*\n(?P<text>.*?)^(?P=mark)[ \t]*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(?P<marks>`+)(?!`)(?P<text>.+?)(?<!`)(?P=marks)(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?(?P<target>[^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_DEFINED = re.compile(r"^ {0,3}\[[^\]]+\]:\s+(?P<target>\S+)", re.MULTILINE)  # [name]: target
_HTML = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"'](?P<target>[^\"']+)[\"']")
_BARE = re.compile(r"(?<![(<\w\"'])(?P<target>[a-z]+://[^\s<>)|]*[^\s<>)|.,;:])")
_CONTINUES = "<!-- continues the block above -->\n"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `continues` where a comment before it says that it needs the block above."""

    page: str
    line: int
    language: str
    text: str
    continues: bool


@dataclass(frozen=True)
class Link:
    line: int
    target: str


def name_of(page: Path, root: Path = ROOT) -> str:
    return str(page.relative_to(root))


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _blanked(found: re.Match[str]) -> str:
    """Spaces in the place of what is shown as it is; the lines stay where they are."""
    return re.sub(r"[^\n]", " ", found[0])


def blocks(page: Path, root: Path = ROOT) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        continues = text[: found.start()].endswith(_CONTINUES)
        yield Block(name_of(page, root), _line(text, found.start()), found["language"], found["text"], continues)


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every `span of code`, with its line breaks as spaces."""
    text = _FENCE.sub(_blanked, page.read_text(encoding="utf-8"))
    for found in _SPAN.finditer(text):
        yield _line(text, found.start()), " ".join(found["text"].split())


def links(page: Path) -> list[Link]:
    """Every target of the page, outside code: inline, by name, in HTML, and addresses that stand by themselves."""
    text = _SPAN.sub(_blanked, _FENCE.sub(_blanked, page.read_text(encoding="utf-8")))
    patterns = (_LINK, _DEFINED, _HTML, _BARE)
    found = {(match.start("target"), match["target"]) for pattern in patterns for match in pattern.finditer(text)}
    return [Link(_line(text, place), target) for place, target in sorted(found)]


def anchors(page: Path) -> set[str]:
    """Return what links may name after #: GitHub's slug of each heading, numbered if repeated, and explicit ids."""
    text = _FENCE.sub(_blanked, page.read_text(encoding="utf-8"))
    found = set(re.findall(r"<\w+[^>]*\b(?:id|name)=[\"']([^\"']+)[\"']", text))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$", text, flags=re.MULTILINE):
        slug = slug_of(heading)
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def slug_of(heading: str) -> str:
    """Lower case; letters, digits, _ and - stay, spaces become -, and all else goes, hence "a, b" is a-b."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")
