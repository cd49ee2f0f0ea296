# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs.yml: the pages as GitHub has them, made into a site without being changed.

Pages link to each other, to files and to folders of the repository by relative paths. Here each target gets a place in
the site, and the links are rewritten to it:

    README.md                     the index
    docs/X                        X
    CONTRIBUTING.md, ...          contributing.md, ...
    another page, such as         source/patches/README.md
    a file of the source          source/PATH as plain text
    a folder of the source        its README.md, or a page that lists its files
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "patches/README.md")
"""Pages outside docs/. Those that one of them links to follow by themselves."""

_LINK = re.compile(r"(?<=\]\()(?!https?:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_SHOWN_AS_IT_IS = {".png", ".svg", ".json", ".txt", ".csv"}
_PLACED: dict[str, str] = {}  # from the place in the site to the path in the repository, of this build


def place(path: str) -> str:
    """Return the place of the repository's file or folder `path` in the site, as mkdocs names sources."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        name = "README.md" if (ROOT / path / "README.md").exists() else "index.md"
        return f"source/{path}/{name}"
    if path.endswith(".md"):
        return path.lower() if "/" not in path else f"source/{path}"
    return f"source/{path}" if Path(path).suffix in _SHOWN_AS_IT_IS else f"source/{path}.txt"


def targets(path: str, markdown: str) -> Iterator[str]:
    """Yield the targets of the links of the page `path`, as paths in the repository."""
    for link in _LINK.finditer(markdown):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link["path"]))


def rewritten(path: str, markdown: str) -> str:
    """Make every relative link of a page lead to its target's place in the site."""
    here = posixpath.dirname(place(path))

    def there(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["path"]))
        return posixpath.relpath(place(target), here or ".") + (link["anchor"] or "")

    return _LINK.sub(there, markdown)


def listing(folder: str) -> str:
    """Write a page for a folder of the source: what is in it, with the first line of what each says about itself."""
    lines = [f"# {folder}/", "", "| | |", "|---|---|"]
    for path in sorted((ROOT / folder).iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            lines.append(f"| [{path.name}/]({path.name}) | {_purpose(path / '__init__.py')} |")
        elif path.is_file() and path.suffix != ".pyc":
            lines.append(f"| [{path.name}]({path.name}) | {_purpose(path)} |")
    return "\n".join([*lines, ""])


def _purpose(path: Path) -> str:
    """Return the first line of a module's docstring; empty for other files."""
    if path.suffix != ".py" or not path.exists():
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/ and, from page to page, all that they link to."""
    from mkdocs.structure.files import File  # here, so that the tests need no mkdocs

    _PLACED.clear()
    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    while waiting:
        path = waiting.pop()
        if place(path) in _PLACED or not (ROOT / path).exists():
            continue  # mkdocs itself complains of a link that leads nowhere
        _PLACED[place(path)] = path
        text = _markdown(path)
        if text is not None:
            waiting += targets(f"{path}/README.md" if (ROOT / path).is_dir() else path, text)
        if not path.startswith("docs/"):
            content = text if text is not None else (ROOT / path).read_bytes()
            files.append(File.generated(config, place(path), content=content))
    return files


def _markdown(path: str) -> str | None:
    """Return the Markdown of a page or a folder; None for a file that is none."""
    if (ROOT / path).is_dir():
        return listing(path)
    return (ROOT / path).read_text(encoding="utf-8") if path.endswith(".md") else None


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = _PLACED[page.file.src_uri]
    return rewritten(f"{path}/README.md" if (ROOT / path).is_dir() else path, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """In a table GitHub reads `a\\|b` as a|b in code, too; Markdown's own tables keep the backslash."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
