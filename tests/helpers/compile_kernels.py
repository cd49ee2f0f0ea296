# SPDX-License-Identifier: Apache-2.0
"""Launch the kernels with Triton's own launcher and no GPU: compiled for sm_80 or sm_90, and never run. Lines of JSON.

`python -m tests.helpers.compile_kernels 90 one-of-each`: only what one micro-batch of each kind of rows needs.
"""

import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from simreg_megatron.kernels import triton as form
from simreg_megatron.kernels.contrast import Tokens

KERNELS = (form._ids_and_norms, form._pairs, form._terms, form._weights, form._product)
KINDS = {"bf16": (torch.bfloat16, 64), "bf16, odd width": (torch.bfloat16, 72), "fp32": (torch.float32, 64)}


def idle(architecture: int) -> Any:
    """As much of a driver as Triton's launcher asks for; it loads and launches nothing."""
    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *_: (1, 1, 0, 0, 1024),  # module, function, registers, spills, most threads
    )
    return SimpleNamespace(
        utils=utils, get_current_device=lambda: 0, get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", architecture, 32), launcher_cls=lambda *_: lambda *_: None,
    )  # fmt: skip


class OnGpu(Tensor):
    """Rows that the kernels take for a GPU's."""

    is_cuda = True  # type: ignore[assignment]


def launch(kind: str, *, full: bool) -> None:
    """Compute terms and their gradient in every way that differs in kernels or in what they are compiled for."""
    (dtype, width), triton_form = KINDS[kind], form.TritonKernels()
    shapes = ((2, 3, 48), False), ((2, 3, 48), True), ((1, 1, 48), False)  # Triton makes constants of ones
    ways = [*itertools.product(shapes, (1,), (True, False)), *itertools.product(shapes[:1], (2,), (True, False))]
    for (shape, has_documents), share, keep in ways if full else ways[:1]:
        rows = torch.zeros(*shape, width, dtype=dtype).as_subclass(OnGpu)
        labels, usable = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool)
        tokens, anchors = Tokens(rows, labels, usable, labels if has_documents else None), (0, shape[2] // share)
        saved = triton_form.forward(tokens, anchors, 0.01, save=keep).saved
        grad = torch.zeros_like(rows[:, :, slice(*anchors)])
        triton_form.backward(rows, saved, torch.zeros(2, *shape), anchors, 0.01, grad)
        if share > 1:
            triton_form.pair_sums(tokens, anchors, 0.01, [(anchors, (anchors[1], shape[2]))])


def compiled(architecture: int, *, full: bool) -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        launch(kind, full=full)
        for kernel in KERNELS:
            for built in kernel.device_caches.pop(0)[0].values():
                yield described(architecture, kernel, kind, built)


def described(architecture: int, kernel: JITFunction, kind: str, built: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(built.asm["ptx"], encoding="utf-8")
        # Triton's own command for ptxas, whose log it keeps to itself.
        target = {80: "sm_80", 90: "sm_90a"}[architecture]
        options = ["-v", "--regAllocOptLevel=2", f"-arch={target}", "-o", str(ptx.with_suffix(".o"))]
        command = [get_ptxas(architecture).path, *options, str(ptx)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = re.sub(r"(?m)^\s*(\.loc|\.file|//).*$|(?s:\.section\s+\.debug.*)", "", built.asm["ptx"])  # no line numbers
    constants = {kernel.arg_names[place]: value for (place,), value in built.src.constants.items()}
    of_16 = [kernel.arg_names[place] for (place,), multiple in built.src.attrs.items() if multiple]
    return {
        "variant": f"{kernel.__name__} {kind} {sorted(constants.items())} {of_16} {[*built.src.signature.values()]}",
        "code": hashlib.sha256(code.encode()).hexdigest(),
        "kernel": kernel.__name__,
        "stack_bytes": int(re.search(r"(\d+) bytes stack frame", log)[1]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "shared_bytes": built.metadata.shared,
        "uses_wgmma": "wgmma.mma_async" in built.asm["ptx"],
    }  # fmt: skip


if __name__ == "__main__":
    architecture = int(sys.argv[1])
    driver.set_active(idle(architecture))
    with mock.patch.object(form, "_gpu", lambda _: (132, architecture // 10)):
        for line in compiled(architecture, full=sys.argv[2:] != ["one-of-each"]):
            print(json.dumps(line), flush=True)
