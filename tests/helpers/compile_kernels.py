# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for sm_80 or sm_90 with Triton's own ptxas, which needs no GPU: one line of JSON for each.

`python -m tests.helpers.compile_kernels 90 one-of-each` takes the first variant of each kernel and type alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from simreg_megatron.kernels import fused, gemm, rows

_TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


def signature_of(kernel: Any, dtype: str, *, is_kept: bool = False) -> dict[str, str]:
    """Types of the arguments as a launch finds them: pointers by name, the rest 32-bit integers."""
    element = dtype if dtype == "fp32" else "bf16"
    pointers = {
        "rows": dtype, "names": "fp32", "scale": "fp32", "documents": "i32", "of_rows": "fp32", "of_columns": "fp32",
        "keep": element, "kept": element, "pull_a": "fp32", "pull_b": "fp32", "weights": element, "copies": element,
        "summed": "fp32", "grad": dtype,
    }  # fmt: skip
    if kernel in (gemm._sums_kernel, gemm._weights_kernel):
        pointers |= {"names": "i64", "documents": "i64", "products": "fp32", "sums": "fp64", "pull": "fp32"}
        pointers |= {"source": element if is_kept else "fp32"}
    if kernel in (rows._ratio_kernel, rows._pull_kernel):
        pointers |= {"sums": "fp64", "total": "fp32", "ratio": "fp32", "grad": "fp32", "pull": "fp32"}
    found = {}
    for name in kernel.arg_names:
        if name in pointers:
            found[name] = f"*{pointers[name]}"
        elif name in ("to_exponent", "factor", "temperature"):
            found[name] = "fp32"
        else:
            found[name] = "i32" if name.islower() or name in ("R", "S") else "constexpr"
    return found


def variants() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    for dtype, upper, documents in itertools.product(_TYPES, (True, False), (True, False)):
        common = {"UPPER": upper, "HAS_DOCUMENTS": documents, "EVEN": True, "PRECISION": "ieee", "WIDEN": False}
        tile = fused.TILE[_TYPES[dtype]]
        if dtype == "fp16" and documents:
            continue  # as bf16
        yield fused._sums_kernel, dtype, {**common, "KEEP": upper, **tile}
        for kept, split in itertools.product((False, True), (False, True) if dtype != "fp32" else (False,)):
            yield fused._weights_kernel, dtype, {**common, "IS_KEPT": kept, "SPLIT": split, **tile}
    yield from _seldom()
    for dtype in ("bf16", "fp32"):
        yield fused._mirror_kernel, dtype, {"SIDE": fused._MIRRORED, "num_warps": 4, "num_stages": 3}
        for documents, kept in itertools.product((True, False), repeat=2):
            common = {"HAS_DOCUMENTS": documents, "num_stages": 3, **gemm.BLOCK}
            yield gemm._sums_kernel, dtype, {"KEEP": kept, **common}
            yield gemm._weights_kernel, dtype, {"IS_KEPT": kept, "SPLIT": dtype == "bf16" and not kept, **common}
        of_row = {"FEATURES": rows._FEATURES, "num_warps": 4, "num_stages": 3}
        yield rows._norms_kernel, dtype, dict(of_row)
        yield rows._copy_kernel, dtype, {"SPLIT": False, **of_row}
        yield rows._project_kernel, dtype, dict(of_row)
    yield rows._copy_kernel, "fp16", {"SPLIT": True, **of_row}
    of_token = {"SIZE": rows._TOKENS, "num_warps": 4, "num_stages": 3}
    yield rows._ratio_kernel, "fp32", dict(of_token)
    yield rows._pull_kernel, "fp32", dict(of_token)


def _seldom() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Widths that no tile divides, and sequences of one chunk, whose number Triton takes into the code."""
    for dtype, itemsize in _TYPES.items():
        common = {"HAS_DOCUMENTS": False, "PRECISION": "ieee", "WIDEN": False, "UPPER": True, **fused.TILE[itemsize]}
        for special in ({"EVEN": False}, {"EVEN": True, "chunks": 1}, {"EVEN": False, "chunks": 1}):
            yield fused._sums_kernel, dtype, {**common, "KEEP": True, **special}
            yield fused._weights_kernel, dtype, {**common, "IS_KEPT": False, "SPLIT": dtype != "fp32", **special}
        for kernel in (rows._norms_kernel, rows._project_kernel):
            yield kernel, dtype, {"FEATURES": rows._FEATURES, "chunks": 1, "num_warps": 4, "num_stages": 3}


def compiled(architecture: int, kernel: Any, dtype: str, constants: dict[str, Any]) -> dict[str, Any]:
    options_given = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    signature = signature_of(kernel, dtype, is_kept=bool(constants.get("IS_KEPT")))
    signature |= dict.fromkeys(constants, "constexpr")
    # Pointers and strides are multiples of 16, as torch and hidden sizes make them, but for what is told to be uneven.
    uneven = ("width", "stride_k") if constants.get("EVEN") is False else ()
    aligned = [
        (index,)
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") or name.startswith("stride") or name in ("length", "width", "R", "S"))
        and name not in uneven
    ]
    source = ASTSource(
        kernel, signature, constexprs=constants, attrs={index: [["tt.divisibility", 16]] for index in aligned}
    )
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options_given)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(built.asm["ptx"], encoding="utf-8")
        # Triton's own command for ptxas, which it runs where a kernel is launched.
        target = {80: "sm_80", 90: "sm_90a"}[architecture]
        options = ["-v", "--regAllocOptLevel=2", f"-arch={target}", "-o", str(ptx.with_suffix(".o"))]
        command = [triton.knobs.nvidia.ptxas.path, *options, str(ptx)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = re.sub(r"(?m)^\s*(\.loc|\.file|//).*$|(?s:\.section\s+\.debug.*)", "", built.asm["ptx"])  # no line numbers
    return {
        "variant": f"{kernel.__name__} {dtype} {sorted(constants.items())} {options_given}",
        "code": hashlib.sha256(code.encode()).hexdigest(),
        "kernel": kernel.__name__, "dtype": dtype,
        "computes_products": "EVEN" in constants and not constants.get("IS_KEPT"),
        "upper": constants.get("UPPER"), "even": constants.get("EVEN"), "documents": constants.get("HAS_DOCUMENTS"),
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "stack_bytes": int(re.search(r"(\d+) bytes stack frame", log)[1]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "shared_bytes": built.metadata.shared,
        "uses_wgmma": "wgmma.mma_async" in built.asm["ptx"],
    }  # fmt: skip


if __name__ == "__main__":
    seen = set()
    for variant in variants():
        if sys.argv[2:] != ["one-of-each"] or variant[:2] not in seen:
            print(json.dumps(compiled(int(sys.argv[1]), *variant)), flush=True)
        seen.add(variant[:2])
