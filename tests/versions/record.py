# SPDX-License-Identifier: Apache-2.0
"""One rank of Megatron's training loop: `python -m tests.versions.record FOLDER absent|installed OUT SCRIPT FLAGS`.

FOLDER holds the `megatron` to use, no other is; SCRIPT runs as __main__ on the CPU. OUT/rank<r>.json then has the loss
and the gradient norm of every step as Megatron reports them, and a digest of the parameters after the last one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.versions.driver import use_only


class Recorder:
    def __init__(self, out: Path) -> None:
        self.path = out / f"rank{os.environ['RANK']}.json"
        self.record: dict[str, Any] = {"losses": [], "norms": [], "params": ""}
        self.chunks: Any = []

    def wrap_step(self, train_step: Any) -> Any:
        @functools.wraps(train_step)
        def recorded(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.chunks = model
            result = train_step(forward_step, data_iterator, model, *args, **kwargs)
            if "lm loss" in result[0]:
                self.record["losses"].append(_number(result[0]["lm loss"]))
            self.record["norms"].append(float(result[5]))
            return result

        return recorded

    def save(self) -> None:
        digest = hashlib.sha256()
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                digest.update(name.encode())
                digest.update(parameter.detach().contiguous().numpy().tobytes())
        self.record["params"] = digest.hexdigest()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record))


def _number(loss: Any) -> float:
    """0.12 reports a sum and a count."""
    total, count = loss if isinstance(loss, tuple | list) else (loss, 1)
    return float(total) / float(count)


def main() -> None:
    folder, plugin, out, script, *flags = sys.argv[1:]
    use_only(Path(folder))
    from simreg_megatron.plugin import cpu_backend

    cpu_backend.activate()
    import megatron.training.training as training

    if plugin == "installed":
        from simreg_megatron import install

        install()
    recorder = Recorder(Path(out))
    training.train_step = recorder.wrap_step(training.train_step)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    recorder.save()


if __name__ == "__main__":
    main()
