# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.versions.patched SCRIPT FLAGS`: a patched script on the CPU. The plugin must come from the patch."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    script, *flags = sys.argv[1:]
    from simreg_megatron.cpu import backend as cpu_backend

    cpu_backend.activate()
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
