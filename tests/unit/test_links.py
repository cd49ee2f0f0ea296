# SPDX-License-Identifier: Apache-2.0
"""Links of the pages lead to files and headings that are there, and the site keeps them. Nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

import simreg_megatron
from simreg_megatron import losses
from tests.helpers.pages import PAGES, ROOT, anchors, links, name_of
from tools.docs_site import place

_OUTSIDE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)")


def broken(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with the page's relative links, a sentence each."""
    for link in links(page):
        if _OUTSIDE.match(link.target):
            continue
        path, _, anchor = link.target.partition("#")
        found = (page.parent / path).resolve() if path else page
        here = f"{name_of(page, root)}:{link.line}: {link.target}"
        if path.startswith("/") or not found.is_relative_to(root):
            yield f"{here} leads out of the repository"
        elif not found.exists():
            yield f"{here} leads to no file"
        elif anchor and found.suffix == ".md" and anchor not in anchors(found):
            yield f"{here} names no heading of that page"
        elif anchor and found.suffix != ".md":
            yield f"{here} has an anchor, which only a page has"


def malformed(address: str) -> str | None:
    """Why an external address is none that a page may have."""
    parts = urlsplit(address)
    if parts.scheme != "https":
        return "is not https"
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc):
        return "has no public host by name alone"
    return None


EXTERNAL = sorted({link.target for page in PAGES for link in links(page) if _OUTSIDE.match(link.target)})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    assert list(broken(page)) == []


def test_external_links_are_https_and_well_formed() -> None:
    assert {address: why for address in EXTERNAL if (why := malformed(address))} == {}


def test_every_page_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\n\n")[0]
    named = set(re.findall(r"[\w/-]+\.md", menu))
    pages = {place(name_of(page)) for page in PAGES} | {f"api/{page.name}" for page in ROOT.glob("docs/api/*.md")}
    assert named == pages, "enter the new page in mkdocs.yml"


@pytest.mark.parametrize("package", [simreg_megatron, losses], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package: ModuleType) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/api/*.md")))
    missing = [name for name in package.__all__ if not re.search(rf"[.\[ ]{name}\b", pages)]
    assert missing == [], "enter them in docs/api"
