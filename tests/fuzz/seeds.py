# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz.seeds`: the kept corpus, small valid files of every kind, made anew by the writers of each."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from simreg_megatron.data.assemble import store_of
from simreg_megatron.data.tokenizer import train_tokenizer
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.plan_file import PLANS, plan_of
from simreg_megatron.reproduce.runs import entries_of
from simreg_megatron.reproduce.store import DONE, Store
from simreg_megatron.reproduce.tuned import untuned
from tests.fuzz.readers import checkpoints, data, results
from tests.fuzz.target import CORPUS
from tests.helpers.checkpoints import dist_checkpoint
from tests.helpers.preparation import TEXTS, lines, train_hugging_face

_PLAN = {
    "name": results.EXPERIMENT, "question": "Is it lower?", "sizes": [64], "seeds": 3, "tokens_per_parameter": [0.01],
    "arms": {"plain": {}, "simreg": {"flags": {"simreg-lambda": 1}}},
    "claims": [{"says": "SimReg ends lower", "arm": "simreg", "than": "plain"}],
}  # fmt: skip


def main() -> None:
    """Write the corpus in place of the one that is there."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, make in enumerate((_checkpoints, _sets, _texts, _tokenizers, _results)):
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
    keep("common-pickle", checkpoints.pickle_in((dist_checkpoint(folder / "made") / "common.pt").read_bytes()))


def _sets(folder: Path, keep: _Keep) -> None:
    data.write_pair(folder / "train")
    keep("index", (folder / "train.idx").read_bytes())
    files = {f"train{ending}": {"bytes": (folder / f"train{ending}").stat().st_size} for ending in (".bin", ".idx")}
    manifest = {"format": 2, "tokens": {"train": 5, "valid": 0}, "vocab_size": 9, "tokenizer_sha256": "0"}
    manifest |= {"files": files, "settings": data.KEPT["settings"], "budget": data.KEPT["budget"]}
    manifest |= {"documents": {"train": 3, "valid": 0}}
    keep("manifest", json.dumps(manifest).encode())
    keep("settings", json.dumps(data.KEPT).encode())
    data.write_one_part(store_of(folder, "train").path(0, 0))
    keep("part", store_of(folder, "train").path(0, 0).read_bytes())


def _texts(folder: Path, keep: _Keep) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    text = lines(TEXTS[:12])
    for name in ("jsonl", "gzip-inside", "zstandard-inside"):
        keep(name, text)
    keep("gzip", gzip.compress(text, mtime=0))
    keep("zstandard", zstandard.ZstdCompressor().compress(text))
    keep("plain-text", TEXTS[9].encode())
    tables = (pyarrow.table({"text": TEXTS[:12]}), pyarrow.table({"text": TEXTS[:4], "id": [1, 2, 3, None]}))
    for number, (table, compression) in enumerate(zip(tables, ("none", "zstd"), strict=True)):
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", compression=compression, row_group_size=5)
    keep("parquet", *((folder / f"{number}.parquet").read_bytes() for number in range(2)))


def _tokenizers(folder: Path, keep: _Keep) -> None:
    train_tokenizer(TEXTS, folder / "made.model", vocab_size=320)
    keep("sentencepiece", (folder / "made.model").read_bytes())
    train_hugging_face(folder / "made")
    keep("tokenizer-json", (folder / "made" / "tokenizer.json").read_bytes())
    config = (folder / "made" / "tokenizer_config.json").read_bytes()
    keep("tokenizer-config-json", config.replace(b"TokenizersBackend", b"PreTrainedTokenizerFast"))  # as 4 says it, too


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
