# SPDX-License-Identifier: Apache-2.0
"""`pip config list | python tools/uv_settings.py`: pip's own settings as the variables that tell uv the same.

One NAME=value a line. Exit status 1, and the setting's name, where uv could not follow: pip does the work then.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

_SAME = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
    "no-index": "UV_NO_INDEX",
}
_BETWEEN = {"UV_FIND_LINKS": ","}  # several values; a space elsewhere
_MATTERLESS = {
    "cache-dir", "disable-pip-version-check", "no-cache-dir", "no-color", "no-input", "progress-bar", "quiet",
    "require-virtualenv", "retries", "root-user-action", "user", "verbose", "no-warn-script-location",
}  # fmt: skip
_ORDER = ("global", "install", ":env:")  # the later ones win


class CannotFollow(ValueError):
    """A setting of pip has no counterpart in uv."""


def settings(lines: Iterable[str]) -> dict[str, str]:
    """Variables of uv from what `pip config list` prints: section.name='value'.

    Raises:
        CannotFollow: a setting changes what pip would install, and uv has none like it.
    """
    found: dict[str, tuple[int, str]] = {}
    for section, name, value in _given(lines):
        if section not in _ORDER or name in _MATTERLESS:
            continue
        if name not in _SAME:
            raise CannotFollow(name)
        variable, rank = _SAME[name], _ORDER.index(section)
        if variable not in found or rank >= found[variable][0]:
            found[variable] = rank, _BETWEEN.get(variable, " ").join(value.split())
    return {variable: value for variable, (_, value) in found.items()}


def _given(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        key, found, value = line.strip().partition("=")
        section, dot, name = key.rpartition(".")
        if found and dot:
            yield section, name.replace("_", "-"), str(ast.literal_eval(value))


def main() -> int:
    try:
        print("\n".join(f"{name}={value}" for name, value in settings(sys.stdin).items()))
    except (CannotFollow, ValueError, SyntaxError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
