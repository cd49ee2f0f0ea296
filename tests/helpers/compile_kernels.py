# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels (`one-of-each`: the first variant) for sm_80 or sm_90 with Triton's ptxas: lines of JSON."""

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
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from simreg_megatron.kernels import triton as form

PRODUCTS = (form._pairs, form._product)


def signature_of(kernel: Any, dtype: str) -> dict[str, str]:
    """Types of the arguments as a launch finds them: pointers by name, the rest 32-bit integers."""
    pointers = {
        "rows": dtype, "names": "i32", "scale": "fp32", "documents": "i32", "of_rows": "fp32", "of_columns": "fp32",
        "pairs": dtype, "weights": dtype, "pull": "fp32", "radial": "fp32", "labels": "i64", "usable": "i1",
        "grad": dtype, "sums": "fp32", "terms": "fp32", "slopes": "fp32",
    }  # fmt: skip
    found = {}
    for name in kernel.arg_names:
        if name in pointers:
            found[name] = f"*{pointers[name]}"
        elif name in ("to_exponent", "to_cosine", "temperature"):
            found[name] = "fp32"
        else:
            found[name] = "i32" if name.islower() else "constexpr"
    return found


def variants(architecture: int) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    for kind in (kind for kind in form.PRODUCT if architecture >= 90 or "sm_90" not in kind):
        of_product = {"PRECISION": "tf32x3" if kind == "fp32" else "ieee", "WIDEN": False, "SMS": 132}
        for upper, documents, backward, keep in itertools.product((True, False), repeat=4):
            if not backward or (keep and not upper):
                names = {"UPPER": upper, "HAS_DOCUMENTS": documents, "BACKWARD": backward, "KEEP": keep}
                tile = form.PAIRS[kind.removesuffix(", sm_90") if backward else kind]
                yield form._pairs, kind, {**names, **of_product, **tile}
        ones = dict.fromkeys(("chunks", "num_chunks", "length", "height"), 1)  # Triton makes constants of them
        for more in ({}, ones):
            yield form._product, kind, {**of_product, **form.PRODUCT[kind], **more}
        yield form._weights, kind, {"IS_FAST": True, "num_stages": 3, **form.WEIGHTS}
        yield form._names_and_norms, kind, {"num_stages": 3, **form.NORMS}
    yield form._terms, "fp32", {"SIZE": form._TOKENS, "num_warps": 4, "num_stages": 3}


def compiled(architecture: int, kernel: Any, kind: str, constants: dict[str, Any]) -> dict[str, Any]:
    dtype, is_odd = kind.partition(",")[0], architecture >= 90 and kind == "bf16"
    options_given = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    signature = signature_of(kernel, dtype) | dict.fromkeys(constants, "constexpr")
    # Pointers and strides are multiples of 16, as torch and hidden sizes make them.
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, type_) in enumerate(signature.items())
        if type_.startswith("*") or (not is_odd and name.startswith(("stride_", "grad_", "length", "width", "pitch")))
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    device = GPUTarget("cuda", architecture, 32)
    built = triton.compile(source, target=device, options={**options_given, "enable_fp_fusion": True})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(built.asm["ptx"], encoding="utf-8")
        # Triton's own command for ptxas, which it runs where a kernel is launched.
        target = {80: "sm_80", 90: "sm_90a"}[architecture]
        options = ["-v", "--regAllocOptLevel=2", f"-arch={target}", "-o", str(ptx.with_suffix(".o"))]
        command = [get_ptxas(architecture).path, *options, str(ptx)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = re.sub(r"(?m)^\s*(\.loc|\.file|//).*$|(?s:\.section\s+\.debug.*)", "", built.asm["ptx"])  # no line numbers
    return {
        "variant": f"{kernel.__name__} {kind} {sorted(constants.items())} {options_given}",
        "code": hashlib.sha256(code.encode()).hexdigest(),
        "kernel": kernel.__name__, "dtype": dtype,
        "computes_products": kernel in PRODUCTS,
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "stack_bytes": int(re.search(r"(\d+) bytes stack frame", log)[1]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "shared_bytes": built.metadata.shared,
        "uses_wgmma": "wgmma.mma_async" in built.asm["ptx"],
    }  # fmt: skip


if __name__ == "__main__":
    seen = set()
    for kernel, kind, constants in variants(int(sys.argv[1])):
        if sys.argv[2:] != ["one-of-each"] or (kernel, kind, len(constants)) not in seen:
            seen.add((kernel, kind, len(constants)))
            print(json.dumps(compiled(int(sys.argv[1]), kernel, kind, constants)), flush=True)
