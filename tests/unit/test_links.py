# SPDX-License-Identifier: Apache-2.0
"""Links of the pages lead to what is there, as do names in the README; patches only add lines. Nothing is fetched."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import simreg_megatron
from launch.demo import table_of
from simreg_megatron import losses
from tests.helpers import jobs
from tests.helpers.pages import PAGES, ROOT, anchors, links, name_of
from tests.megatron.parity.cells import CELLS
from tests.versions import patches, releases
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    assert list(broken(page)) == []


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


README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
SUPPORT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


def test_the_numbers_are_what_the_demo_prints() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text(encoding="utf-8"))
    assert f"```text{table_of(result['runs'])}\n```\n" in README


def test_named_rows_of_the_parity_table_exist() -> None:
    table = SUPPORT.partition("## Megatron releases")[0].partition("\n| ")[2]
    patterns = re.findall(r"\*parity '?([^']+?)'?\*(?= |,)", table)
    missing = [pattern for pattern in patterns if not any(re.search(pattern, cell.name) for cell in CELLS)]
    assert patterns and not missing


def test_named_files_and_extras_exist() -> None:
    files = set(re.findall(r"tests/[\w/.]+\.py|docs/[\w-]+\.(?:md|png)", README + SUPPORT))
    assert files and not [path for path in files if not (ROOT / path).is_file()]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    extras = set(re.findall(r"pip install '\.\[(\w+)\]'", README + GUIDES))
    assert extras and not [extra for extra in extras if not re.search(rf'^    "{extra}": ', setup, re.MULTILINE)]


PATCHES = sorted(patches.FOLDER.glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_adds_lines_only(patch: Path) -> None:
    counted = jobs.run(["git", "apply", "--numstat", "--unidiff-zero", str(patch)], cwd=ROOT, check=True).stdout
    assert {line.split()[1] for line in counted.splitlines()} == {"0"}, "lines that it takes away"
    added = [line[1:].strip() for line in patch.read_text().splitlines() if line.startswith("+ ")]
    scripts = patches.scripts_of(patch)
    assert added.count("simreg_megatron.install()") == added.count("import simreg_megatron") == len(scripts)


def test_every_release_line_has_its_patch() -> None:
    needed = {patches.patch_for(version) for version in (*releases.VERSIONS, "main")}
    assert needed == set(PATCHES)
