# SPDX-License-Identifier: Apache-2.0
"""Extension of the docstring reader of mkdocs.yml: `a, b: text` documents two parameters, each with its own type."""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # in the tests, which read no docstrings by it
    Extension = object

_TOGETHER = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+)(?P<text>: .*(?:\n(?P=indent) +.*)*)", re.MULTILINE)


def each_alone(docstring: str, parameters: set[str]) -> str:
    """The docstring with an entry for each of the parameters that share one; other lines stay."""

    def entries(found: re.Match[str]) -> str:
        names = found["names"].split(", ")
        if not parameters.issuperset(names):
            return found[0]
        return "\n".join(f"{found['indent']}{name}{found['text']}" for name in names)

    return _TOGETHER.sub(entries, docstring)


class ParametersAlone(Extension):
    """Give every parameter an entry of its own before the docstring is parsed."""

    def on_function_instance(self, *, func: Any, **_: Any) -> None:
        if func.docstring:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = each_alone(func.docstring.value, names)
