# SPDX-License-Identifier: Apache-2.0
"""`python tools/extra.py NAME ...`: print the requirements in the lists NAME ... of setup.py, one a line.

`pip install '.[docs]'` would install torch, too: the documentation needs none, and a container has its own. Any Python
reads this; setuptools is not needed.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SETUP = Path(__file__).resolve().parent.parent / "setup.py"


def requirements(name: str) -> list[str]:
    """Return the list that setup.py assigns to `name`.

    Raises:
        KeyError: there is none.
    """
    for node in ast.parse(SETUP.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [name]:
            return list(ast.literal_eval(node.value))
    raise KeyError(name)


if __name__ == "__main__":
    print("\n".join(line for name in sys.argv[1:] for line in requirements(name)))
