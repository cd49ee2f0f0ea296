# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of both formats, and Hugging Face folders: each file of a good folder in turn.

torch's archives are zip files, whose checksums stop nearly every change at the door; so there are targets for the
archive as it is, and others for the pickle inside of a sound one.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

from simreg_megatron.checkpoint.architecture import Architecture, check_weights
from simreg_megatron.checkpoint.dist_format import Chunk, Place, Stored
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.export import plan_export
from simreg_megatron.checkpoint.hf_folder import open_model
from simreg_megatron.checkpoint.huggingface import targets
from simreg_megatron.checkpoint.pickles import load_torch
from simreg_megatron.checkpoint.source import TRACKER, open_checkpoint
from tests.fuzz.target import CORPUS, Target
from tests.helpers.checkpoints import DENSE, dist_checkpoint, random_weights

SMALL = replace(DENSE, num_layers=1, hidden=8, num_heads=2, num_groups=1, ffn=4, vocabulary=6)
SMALL_EXPERTS = replace(SMALL, num_experts=2, experts_per_token=1)
RANK_FILE = "mp_rank_00/model_optim_rng.pt"
_SHAPE = (2, 3)
_PICKLE = (
    b"cposix\nsystem\n(S'id'\ntR.", b"\x8c\x08builtins\x8c\x04eval\x93", b"ctests.fuzz.foreign\nName\n", b"(lp0\n",
    b"cbuiltins\nbytearray\n(I9999999999\ntR.", b"ctorch\nSize\n", b"cargparse\nNamespace\n", b"\x80\x04",
    b"r\xff\xff\xff\x7f", b"\x8f", b"}(", b"u.", b"cmegatron.x\nY\n)\x81", b"b.", b"\x94", b"R",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
)  # fmt: skip


def archive_of(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def pickle_in(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))


def with_pickle(archive: bytes, data: bytes) -> bytes:
    """The archive with another pickle, and checksums that match."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened, zipfile.ZipFile(made, "w") as out:
        for name in opened.namelist():
            out.writestr(name, data if name.endswith("data.pkl") else opened.read(name))
    return made.getvalue()


def rank_content(architecture: Architecture = SMALL) -> dict[str, object]:
    """What one rank's file holds, of a model on one rank; experts in one matrix, as Megatron groups them."""
    args = vars(load_torch(_common(architecture), path=Path("common.pt"))["args"])
    named = argparse.Namespace(**{name: value for name, value in args.items() if name != "arguments"})
    model = random_weights(architecture)
    if architecture.num_experts:
        for kind in (1, 2):
            names = [name for name in model if name.endswith(f"linear_fc{kind}.weight") and ".experts." in name]
            each = torch.stack([model.pop(name).t() for name in names])
            model[f"decoder.layers.0.mlp.experts.weight{kind}"] = (
                each.reshape(architecture.hidden, -1) if kind == 1 else each.reshape(-1, architecture.hidden)
            )
    return {"args": named, "checkpoint_version": 3.0, "iteration": 1, "model": model}


def _common(architecture: Architecture) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return (dist_checkpoint(Path(folder) / "made", architecture) / "common.pt").read_bytes()


def hugging_face(folder: Path, architecture: Architecture = SMALL) -> Path:
    """A LLaMA as transformers keeps it."""
    from safetensors.torch import save_file

    from simreg_megatron.checkpoint.huggingface import config_entries, config_of

    folder.mkdir(parents=True)
    tensors = random_weights(architecture)
    save_file(
        {one.name: one.cut(tensors[one.source]).contiguous().clone() for one in targets(architecture)},
        folder / "model.safetensors",
    )
    import json

    entries = config_entries(architecture, config_of(architecture, bos=1, eos=2), "float32")
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


# ---- what is read ----------------------------------------------------------------------------------------------------


def _read_whole(folder: Path) -> None:
    """As `export-hf` does: the plan, then every tensor that the plan would write."""
    checkpoint = open_checkpoint(folder)
    plan = plan_export(checkpoint)
    check_weights(plan.architecture, checkpoint.weights)
    for target in targets(plan.architecture):
        target.cut(checkpoint.weights[target.source].read())


def _dist(folder: Path) -> None:
    """Of the corpus, as another torch writes files of other lengths."""
    dist_checkpoint(folder / "made", SMALL)
    for target, name in (("metadata", ".metadata"), ("distcp", "__0_0.distcp"), ("common", "common.pt")):
        (folder / "made" / name).write_bytes((CORPUS / target / "valid-1").read_bytes())


def _dist_file(name: str):  # type: ignore[no-untyped-def]
    def read(folder: Path, data: bytes) -> None:
        (folder / "made" / name).write_bytes(data)
        _read_whole(folder / "made")

    return read


def _common_pickle(folder: Path, data: bytes) -> None:
    path = folder / "made" / "common.pt"
    kept = folder / "common"
    if not kept.is_file():
        kept.write_bytes(path.read_bytes())
    path.write_bytes(with_pickle(kept.read_bytes(), data))
    _read_whole(folder / "made")


def _ranks(folder: Path, architecture: Architecture = SMALL) -> None:
    (folder / "made" / RANK_FILE).parent.mkdir(parents=True)
    (folder / "kept").write_bytes(archive_of(rank_content(architecture)))


def _ranks_of_experts(folder: Path) -> None:
    _ranks(folder, SMALL_EXPERTS)


def _rank_file(folder: Path, data: bytes) -> None:
    (folder / "made" / RANK_FILE).write_bytes(data)
    _read_whole(folder / "made")


def _rank_pickle(folder: Path, data: bytes) -> None:
    _rank_file(folder, with_pickle((folder / "kept").read_bytes(), data))


def _chunk(folder: Path, data: bytes) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(data)
    place = Place(path, 0, len(data))
    Stored("weight", _SHAPE, torch.float32, (Chunk((0, 0), _SHAPE, place),)).read()


def _chunk_pickle(folder: Path, data: bytes) -> None:
    _chunk(folder, with_pickle(archive_of(torch.zeros(_SHAPE)), data))


def _steps(folder: Path) -> None:
    for name in ("iter_0001000", "release"):
        dist_checkpoint(folder / name, SMALL)


def _tracker(folder: Path, data: bytes) -> None:
    (folder / TRACKER).write_bytes(data)
    open_checkpoint(folder)


def _model(folder: Path) -> None:
    hugging_face(folder / "made")


def _model_file(name: str):  # type: ignore[no-untyped-def]
    def read(folder: Path, data: bytes) -> None:
        (folder / "made" / name).write_bytes(data)
        for weight in open_model(folder / "made").weights.values():
            weight.read()

    return read


_ERRORS = (CheckpointError,)
_JSON = (b'"', b"{}", b"[]", b"null", b"true", b"-1", b"1e999", b"NaN", b'"../x"', b"\\ud800", b":", b",", b"[" * 500)
_CONFIG = (
    *_JSON, b'"model_type"', b'"mixtral"', b'"rope_scaling"', b'"llama3"', b'"num_local_experts"', b'"auto_map"',
    b'"rope_theta"', b'"num_hidden_layers"', b'"vocab_size"', b'"tie_word_embeddings"', b'"head_dim"',
)  # fmt: skip

TARGETS = (
    Target("metadata", _dist_file(".metadata"), _ERRORS, _dist, _PICKLE),
    Target("distcp", _dist_file("__0_0.distcp"), _ERRORS, _dist),
    Target("common", _dist_file("common.pt"), _ERRORS, _dist),
    Target("common-pickle", _common_pickle, _ERRORS, _dist, _PICKLE),
    Target("chunk", _chunk, _ERRORS),
    Target("chunk-pickle", _chunk_pickle, _ERRORS, words=_PICKLE),
    Target("rank-file", _rank_file, _ERRORS, _ranks),
    Target("rank-pickle", _rank_pickle, _ERRORS, _ranks, _PICKLE),
    Target("experts-pickle", _rank_pickle, _ERRORS, _ranks_of_experts, _PICKLE),
    Target("tracker", _tracker, _ERRORS, _steps, (b"release", b"9" * 5000, b"-1", b"\xd9\xa3", b"../..")),
    Target("hf-config", _model_file("config.json"), _ERRORS, _model, _CONFIG),
    Target("hf-index", _model_file("model.safetensors.index.json"), _ERRORS, _model, _JSON),
    Target("safetensors", _model_file("model.safetensors"), _ERRORS, _model, (b'"F64"', b'"BF16"', b"[0,0]", *_JSON)),
)
