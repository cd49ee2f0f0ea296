# SPDX-License-Identifier: Apache-2.0
"""One rank of a run on megatron-core alone: `python -m tests.versions.driver CORE INPUT OUT LAYOUT ...`.

Under each layout it takes the gradient of one global batch without the plugin, with the plugin at lambda 0, and with
SimReg on, in both of Megatron's ways to normalise a loss, and with other settings in one of them; it writes
OUT/<layout>/rank<r>.pt.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

MODES = ("default", "per-token")
VARIANTS = ("absent", "zero", "on")
"""Each of them in both modes."""
SETTINGS = ("defaults", "plain", "scalars", "several")
"""SimReg as users get it; the same by plain torch; scalars that are trained; several objectives. In the first mode."""
RUNS = (*(f"{mode} {variant}" for mode in MODES for variant in VARIANTS), *(f"{MODES[0]} {name}" for name in SETTINGS))
TEMPERATURE, LAMBDA = 0.5, 10.0
SCALARS, SEVERAL = f"simreg:{LAMBDA:g},sigmoid:5", f"simreg:{LAMBDA:g},sigreg:0.3"


def use_only(core: Path) -> None:
    """Let `megatron` be this folder's alone: it is a namespace, and would go on in the interpreter's own packages."""
    sys.path.insert(0, str(core))
    import megatron

    megatron.__path__ = [str(core / "megatron")]


def configurations(chunk: int) -> dict[str, Any]:
    """Return the settings that each variant is installed with; None: nothing is installed."""
    from simreg_megatron import SimRegConfig

    felt: dict[str, Any] = {"temperature": TEMPERATURE, "chunk_size": chunk}
    return {
        "absent": None,
        "zero": SimRegConfig(),
        "on": SimRegConfig(lambda_=LAMBDA, **felt),
        "defaults": SimRegConfig(lambda_=LAMBDA),
        "plain": SimRegConfig(lambda_=LAMBDA, impl="reference"),
        "scalars": SimRegConfig(objective=SCALARS, similarity="learnable", **felt),
        "several": SimRegConfig(objective=SEVERAL, **felt),
    }


def measure(layout: Any, given: dict[str, Any]) -> dict[str, Any]:
    from simreg_megatron import install, uninstall
    from tests.versions import tiny

    tiny.start(layout)
    configs = configurations(given["chunk"])
    record: dict[str, Any] = {"shards": {}}
    for run in RUNS:
        mode, variant = run.split()
        if configs[variant] is not None:
            install(config=configs[variant])  # before the model is built: some settings give it parameters
        try:
            chunks = tiny.build(layout, given["vocabulary"], per_token=mode == "per-token")
            tiny.load(chunks, given["weights"])
            losses = tiny.step(chunks, layout, given["tokens"], given["mask"])
        finally:
            uninstall()
        record[run] = {"losses": losses, "grads": tiny.gradients(chunks)}
        record["shards"] |= {name: tiny.shard_of(parameter) for name, parameter in tiny.named_parameters(chunks)}
    return record


def main() -> None:
    core, source, out, *names = sys.argv[1:]
    use_only(Path(core))
    from simreg_megatron.cpu import backend as cpu_backend

    cpu_backend.activate()
    import megatron.core

    from tests.versions import tiny

    assert Path(megatron.core.__file__).is_relative_to(core), megatron.core.__file__

    given = torch.load(source, weights_only=True)
    for name in names:
        try:
            record = measure(tiny.LAYOUTS[name], given)
        except Exception as error:  # the other layouts still tell something
            traceback.print_exc()
            record = {"error": f"{type(error).__name__}: {error}"}
        path = Path(out) / name / f"rank{os.environ['RANK']}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(record, path)
        if "error" in record:
            os._exit(1)  # ranks that wait for this one must not wait for ever


if __name__ == "__main__":
    main()
