# SPDX-License-Identifier: Apache-2.0
"""Megatron's loop over packed rows of varying length (`--use-varlen-dataset`), which no released wheel has yet.

MEGATRON_PATH names a Megatron-LM tree with that flag: main from request 6742 on, or the dev branch of August 2026. As a
script this starts its `pretrain_gpt.py` on the CPU, with stand-ins for Transformer Engine; the first argument is the
cut over context ranks, the contiguous one of which Megatron allows only with attention that needs a GPU.
"""

import importlib
import json
import os
import random
import re
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import simreg_megatron
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from tests.megatron import runs
from tests.megatron import text as texts

TREE = Path(os.environ.get("MEGATRON_PATH", "."))
CP2 = "--context-parallel-size 2 --cp-comm-type all_gather --max-seqlen-per-dp-cp-rank 64"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = [(2, "zigzag", ""), (2, "zigzag", CP2), (4, "zigzag", f"{CP2} {TP2}")]
LAYOUTS += [(4, "zigzag", f"{CP2} --pipeline-model-parallel-size 2")]
if (TREE / "megatron/core/context_parallel_layout").is_dir():  # the dev branch
    LAYOUTS += [(4, "zigzag", "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 32"), (2, "contiguous", CP2)]
    LAYOUTS += [(2, "zigzag", f"{CP2} --pad-packed-seq-alignment 16"), (4, "contiguous", f"{CP2} {TP2}")]
FLAGS = (
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 "
    "--moe-token-dispatcher-type alltoall --calculate-per-token-loss --use-varlen-dataset --ckpt-format torch_dist "
    "--max-seqlen-per-dp-cp-rank 128 --simreg-chunk-size 0"
)


def numbers(*words: str, processes: int = 1) -> list[float]:
    """Losses, SimReg's loss and positive cosine, and gradient norms of all steps, as Megatron logs them."""
    done = runs.torchrun(["-m", "tests.megatron.test_varlen", *words], processes, PYTHONPATH=f"{TREE}:{runs.ROOT}")
    assert done.status == 0, done.output[-3000:]
    found = re.findall(r"(?:simreg loss|positive cosine|lm loss|grad norm): ([\d.E+-]+)", done.output)
    return list(map(float, found))


@pytest.mark.slow
@pytest.mark.skipif(not (TREE / "megatron/training/datasets/varlen_dataset.py").exists(), reason="no such tree")
def test_rows_of_varying_length_are_exact_in_every_layout(text: BuiltinCorpus, tmp_path: Path) -> None:
    data, phrases, draw = texts.chats(text, tmp_path / "chats"), iter(texts.phrases()), random.Random(1)
    rows = [" ".join(next(phrases, "") for _ in range(draw.randint(1, 6))).strip() for _ in range(800)]
    Path(data[1]).write_text("\n".join(json.dumps({"text": row}) for row in rows if row))
    flags = runs.all_flags([*runs.SIMREG, *data[:-1], *FLAGS.split()], "dense")
    saved = str(tmp_path / "saved")
    numbers("zigzag", *flags, "--train-iters", "1", "--save", saved, "--save-interval", "1")
    flags += ["--load", saved, "--finetune", "--no-load-optim", "--no-load-rng"]
    expected = numbers("zigzag", *flags)
    assert len(expected) == 12
    for processes, cut, more in LAYOUTS:
        found = numbers(cut, *flags, *more.split(), processes=processes)
        assert found == pytest.approx(expected, rel=1e-4), (cut, more)
    local = numbers("zigzag", *flags, *CP2.split(), "--simreg-scope", "local", processes=2)
    assert local != pytest.approx(expected, rel=1e-2), "chunks that end where a rank's blocks end must fail"


def main() -> None:
    cpu_backend.activate()
    from megatron.core import utils
    from megatron.core.datasets import data_schedule
    from megatron.core.transformer import transformer_config

    transformer_config.is_te_min_version = lambda *_, **__: True
    data_schedule.tex = utils.tex
    with suppress(ImportError):  # of the dev branch
        packing = importlib.import_module("megatron.core.datasets.data_schedule_utils")
        packing.get_thd_partitioned_indices = utils.tex.thd_get_partitioned_indices
    barrier, cut, check = dist.barrier, sys.argv.pop(1), transformer_config.TransformerConfig.__post_init__
    dist.barrier = lambda group=None, **_: barrier(group)  # gloo takes no device_ids

    def set_cut(config: Any) -> None:  # after Megatron's own check, which asks for attention that needs a GPU
        check(config)
        config.cp_partition_mode = cut

    transformer_config.TransformerConfig.__post_init__ = set_cut
    simreg_megatron.install()
    sys.argv[0] = str(TREE / "pretrain_gpt.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
