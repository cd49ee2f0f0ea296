# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz.seeds`: the kept corpus, small valid files of every kind, made anew by the writers of each."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.plan_file import PLANS, plan_of
from simreg_megatron.reproduce.runs import entries_of
from simreg_megatron.reproduce.store import DONE, Store
from simreg_megatron.reproduce.tuned import untuned
from tests.fuzz.readers import checkpoints, results
from tests.fuzz.target import CORPUS
from tests.helpers.checkpoints import dist_checkpoint

_PLAN = {
    "name": results.EXPERIMENT, "question": "Is it lower?", "sizes": [64], "seeds": 3, "tokens_per_parameter": [0.01],
    "arms": {"plain": {}, "simreg": {"flags": {"simreg-lambda": 1}}},
    "claims": [{"says": "SimReg ends lower", "arm": "simreg", "than": "plain"}],
}  # fmt: skip


def main() -> None:
    """Write the corpus in place of the one that is there."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, make in enumerate((_checkpoints, _models, _results)):
            (Path(folder) / str(number)).mkdir()
            make(Path(folder) / str(number), _keep)
    size = sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file())
    print(f"{CORPUS}: {size:,} bytes")


_Keep = Callable[..., None]


def _keep(target: str, *contents: bytes) -> None:
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(contents, start=1):
        (CORPUS / target / f"valid-{number}").write_bytes(content)


def _checkpoints(folder: Path, keep: _Keep) -> None:
    dense = dist_checkpoint(folder / "dense", checkpoints.SMALL)
    keep("metadata", (dense / ".metadata").read_bytes())
    keep("distcp", (dense / "__0_0.distcp").read_bytes())
    common = (dense / "common.pt").read_bytes()
    keep("common", common)
    keep("common-pickle", checkpoints.pickle_in(common))
    chunk = checkpoints.archive_of(torch.zeros(2, 3))
    keep("chunk", chunk)
    keep("chunk-pickle", checkpoints.pickle_in(chunk))
    rank = checkpoints.archive_of(checkpoints.rank_content())
    keep("rank-file", rank)
    keep("rank-pickle", checkpoints.pickle_in(rank))
    experts = checkpoints.archive_of(checkpoints.rank_content(checkpoints.SMALL_EXPERTS))
    keep("experts-pickle", checkpoints.pickle_in(experts))
    keep("tracker", b"1000", b"release\n")


def _models(folder: Path, keep: _Keep) -> None:
    model = checkpoints.hugging_face(folder / "model")
    keep("hf-config", (model / "config.json").read_bytes())
    keep("safetensors", (model / "model.safetensors").read_bytes())
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    keep("hf-index", json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}).encode())


def _results(folder: Path, keep: _Keep) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step in (1, 2, 3):
            writer.add_scalar("lm loss", 4 - step, step)
        writer.add_scalar("lm loss validation", 2.5, 3)
        writer.add_text("seq_length", "16", 0)
        writer.add_text("global_batch_size", "8", 0)
    (path,) = (folder / "tensorboard").iterdir()
    keep("events", path.read_bytes())
    keep("events-inside", b"\n--\n".join(results.events_in(path.read_bytes())))
    keep("plan-yaml", *(path.read_bytes() for path in (PLANS / "saving.yaml", PLANS / "tuning.yaml")))
    keep("cluster-env", (Path(__file__).parents[2] / "launch" / "slurm" / "cluster.env").read_bytes())
    plan = plan_of(_PLAN, where="the seed")
    entries = entries_of(plan, Dataset(Path(), "0" * 64, 1.0, 1), untuned)
    store = Store(folder)
    for entry in entries:
        result = {"status": DONE, "validation_loss": 2.5, "version": "0", "commit": "0"}
        result |= {"curves": {"validation_loss": [(entry.run.steps, 2.5)]}}
        store.run_folder(entry.run).mkdir(parents=True, exist_ok=True)
        store.keep(entry.run, result)
    store.write_tables(plan, entries)
    for target, name in results.TABLES.items():
        keep(target, (folder / name).read_bytes())
    keep(
        "run-csv", b"run,tag,step,value\na,validation_loss,1,2.5\nb,validation_loss,1,2\n", b"step,lm loss\n1,4\n2,3\n"
    )


if __name__ == "__main__":
    main()
