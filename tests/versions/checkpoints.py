# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every release: `python -m tests.versions.checkpoints [--only REGEX] [--cache DIR]` prints a table.

Each release's own megatron.core loads a checkpoint with the keys that `import-hf` writes, in a layout of ranks, and
saves it again; every tensor must then be the same, bit for bit.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.helpers import stored
from tests.helpers.checkpoints import dist_checkpoint, tiny_config
from tests.versions import processes, releases
from tests.versions.driver import use_only

MODELS = {"dense": tiny_config(vocab_size=16), "experts": tiny_config(experts=4, vocab_size=16)}
MODELS["grouped"] = MODELS["experts"]
LAYOUTS = {"one": (1, 1, 1), "TP 2": (2, 1, 1), "PP 2": (1, 2, 1), "EP 2": (1, 1, 2)}
CELLS = (
    *(("dense", layout) for layout in ("one", "TP 2", "PP 2")),
    *(("experts", layout) for layout in ("TP 2", "PP 2", "EP 2")),
    *(("grouped", layout) for layout in ("TP 2", "EP 2")),
)


def build(kind: str, layout: tuple[int, int, int]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    tensor, pipeline, expert = layout
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    model_parallel_cuda_manual_seed(1)
    a = MODELS[kind]
    experts = getattr(a, "num_local_experts", None)
    config = TransformerConfig(
        num_layers=a.num_hidden_layers, hidden_size=a.hidden_size, ffn_hidden_size=a.intermediate_size,
        num_attention_heads=a.num_attention_heads, num_query_groups=a.num_key_value_heads,
        normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        bias_activation_fusion=False, apply_rope_fusion=False,
        tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert, pipeline_dtype=torch.float32,
        num_moe_experts=experts, moe_ffn_hidden_size=a.intermediate_size if experts else None, moe_router_topk=2,
        moe_grouped_gemm=kind == "grouped",
    )  # fmt: skip
    if kind == "grouped":  # its kernels are not here; nothing is computed, only named, cut and saved
        from megatron.core.transformer.moe import experts as layers

        layers.gg.assert_grouped_gemm_is_available = lambda: None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=kind == "grouped", normalization="RMSNorm")
    return GPTModel(
        config, spec, vocab_size=a.vocab_size, max_sequence_length=a.max_position_embeddings,
        position_embedding_type="rope",
        pre_process=stage == 0, post_process=stage == pipeline - 1, share_embeddings_and_output_weights=False,
    )  # fmt: skip


def _let_old_writers_write() -> None:
    """Newer releases of torch need the format for their writer of one item; Megatron 0.12 does not pass it."""
    import functools
    import inspect

    from torch.distributed.checkpoint import filesystem

    plain = filesystem._write_item
    if "serialization_format" not in inspect.signature(plain).parameters:
        return

    @functools.wraps(plain)
    def write_item(*args: Any, **kwargs: Any) -> Any:
        try:
            inspect.signature(plain).bind(*args, **kwargs)
        except TypeError:
            kwargs["serialization_format"] = filesystem.SerializationFormat.TORCH_SAVE
        return plain(*args, **kwargs)

    filesystem._write_item = write_item


def main_rank() -> None:
    """One rank: load SOURCE and save it in OUT/dist."""
    core, kind, layout, source, out = sys.argv[2:]
    use_only(Path(core))
    from simreg_megatron.cpu import backend as cpu_backend

    cpu_backend.activate()
    _let_old_writers_write()
    from megatron.core import dist_checkpointing

    sizes = LAYOUTS[layout]
    model = build(kind, sizes)
    common = torch.load(Path(source) / "common.pt", weights_only=False)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, source)
    model.load_state_dict(loaded["model"], strict=False)  # states of layers that this release does not have

    args = common["args"]
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    for name, size in zip(names, sizes, strict=True):
        setattr(args, name, size)
    Path(out, "dist").mkdir(exist_ok=True)
    dist_checkpointing.save({"model": model.sharded_state_dict(), "args": args, "iteration": 1}, str(Path(out, "dist")))


def check(version: str, cache: Path, kind: str, layout: str, scratch: Path) -> str:
    """ "yes", "-" where the release has no such layers, or what went wrong."""
    core, extras = releases.installed(version, cache), releases.extras(cache)
    experts = core / "megatron" / "core" / "transformer" / "moe" / "experts.py"
    if kind == "grouped" and "class GroupedMLP(" not in experts.read_text(encoding="utf-8"):
        return "-"
    source = dist_checkpoint(scratch / "source", MODELS[kind])
    status = processes.run(
        ["-m", "tests.versions.checkpoints", "--rank", str(core), kind, layout, str(source), str(scratch)],
        processes=max(LAYOUTS[layout]),
        log=scratch / "log",
        path=[extras],
    )
    if status:
        last = [line for line in (scratch / "log").read_text().splitlines() if "Error" in line] or ["no word"]
        return last[-1]
    truth, found = stored.tensors(source), stored.tensors(scratch / "dist")
    missing = [name for name in truth.keys() - found.keys() if "layernorm" not in name and "layer_norm" not in name]
    if missing:
        return f"without {min(missing)}"  # of a norm, each kind of layers has one of two names
    wrong = [name for name, tensor in found.items() if not torch.equal(truth[name], tensor)]
    if wrong:
        return f"other numbers in {wrong[0]}"
    return "yes"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions.checkpoints", description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="releases whose number it finds")
    parser.add_argument("--cache", type=Path, default=processes.ROOT / ".versions", help="installed releases")
    options = parser.parse_args()
    failed = 0
    print("| release | " + " | ".join(f"{kind}, {layout}" for kind, layout in CELLS) + " |")
    print("| --- " * (len(CELLS) + 1) + "|")
    for version in releases.VERSIONS:
        if not re.search(options.only, version):
            continue
        row = []
        for kind, layout in CELLS:
            with tempfile.TemporaryDirectory() as scratch:
                row.append(check(version, options.cache.resolve(), kind, layout, Path(scratch)))
        failed += sum(cell not in ("yes", "-") for cell in row)
        print(f"| {version} | " + " | ".join(row) + " |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        main_rank()
    else:
        raise SystemExit(main())
