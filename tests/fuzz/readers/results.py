# SPDX-License-Identifier: Apache-2.0
"""What runs leave and what starts them: TensorBoard folders, plans, tables of results, `cluster.env`."""

from __future__ import annotations

import struct
from pathlib import Path

from launch.flags import LaunchError
from launch.slurm.site import read_site
from simreg_megatron.report.arms import read_arms
from simreg_megatron.report.runs import ReportError, read_run
from simreg_megatron.reproduce.check import read_tables, violations
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan_file import read_plan
from simreg_megatron.reproduce.store import Store
from simreg_megatron.tools.indexed import DataError
from tests.fuzz.target import CORPUS, Target

EXPERIMENT = "small"
_EVENTS = "events.out.tfevents.1.here"
TABLES = {"plan-json": f"{EXPERIMENT}.plan.json", "table": f"{EXPERIMENT}.csv", "curves": f"{EXPERIMENT}-curves.csv"}


def events_in(data: bytes) -> list[bytes]:
    """The records of a TensorBoard file."""
    found, place = [], 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        found.append(data[place + 12 : place + 12 + length])
        place += 16 + length
    return found


def framed(payloads: list[bytes]) -> bytes:
    """Records with checksums that match, as TensorBoard's writer makes them."""
    from tensorboard.summary.writer.record_writer import masked_crc32c

    parts = []
    for payload in payloads:
        head = struct.pack("<Q", len(payload))
        parts += [head, struct.pack("<I", masked_crc32c(head)), payload, struct.pack("<I", masked_crc32c(payload))]
    return b"".join(parts)


# ---- what is read ----------------------------------------------------------------------------------------------------


def _site(folder: Path, data: bytes) -> None:
    (folder / "cluster.env").write_bytes(data)
    read_site(folder / "cluster.env", {"HOME": "/home/x"})


def _events(folder: Path, data: bytes) -> None:
    (folder / _EVENTS).write_bytes(data)
    run = read_run(folder)
    _ = run.tokens_per_step, [(run.last(tag), run.mean_of_end(tag), run.median(tag)) for tag in run.scalars]


def _events_inside(folder: Path, data: bytes) -> None:
    """An empty line of four bytes divides records, so that mutations make, join and lose some."""
    _events(folder, framed(data.split(b"\n--\n")))


def _plan(folder: Path, data: bytes) -> None:
    (folder / "plan.yaml").write_bytes(data)
    plan = read_plan(str(folder / "plan.yaml"))
    _ = plan.is_search, [plan.seeds_at(size) for size in plan.sizes]


def _results(folder: Path) -> None:
    for target, name in TABLES.items():
        (seed,) = (CORPUS / target).iterdir()
        (folder / name).write_bytes(seed.read_bytes())


def _results_file(name: str):  # type: ignore[no-untyped-def]
    def read(folder: Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        tables = read_tables(folder)
        for table in tables:
            violations(table, tables)
        Store(folder)

    return read


def _own_table(folder: Path, data: bytes) -> None:
    (folder / "run.csv").write_bytes(data)
    for arm in read_arms([str(folder / "run.csv")]):
        _ = arm.losses, arm.seconds, arm.objective, arm.curve


_CSV = (b",", b'"', b"\n", b"\r", b"\0", b"nan", b"1e400", b"9" * 5000, b"step", b"value", b"run", b"validation_loss")
_YAML = (
    b"arms:", b"trials:", b"flags:", b"claims:", b"sizes:", b"seeds:", b"&a ", b"*a", b"[*a,*a,*a,*a,*a,*a,*a,*a]",
    b"!!python/object/apply:os.system [id]", b"2001-99-99", b"0x1_", b".inf", b"{}", b"[]", b"null", b"- ", b"\t",
    b"9" * 5000,
)  # fmt: skip
_ENV = (
    b"export ",
    b"=",
    b"'",
    b'"',
    b"$HOME",
    b"$X",
    b"${",
    b"$(id)",
    b"`id`",
    b"\\",
    b"GPUS_PER_NODE=",
    b"9" * 5000,
    b"#",
)
_ERRORS = (ReproduceError, DataError)
TARGETS = (
    Target("cluster-env", _site, (LaunchError,), words=_ENV),
    Target("events", _events, (ReportError,)),
    Target("events-inside", _events_inside, (ReportError,), words=(b"\n--\n", b"lm loss", b"/text_summary")),
    Target("plan-yaml", _plan, _ERRORS, words=_YAML),
    *(
        Target(
            target, _results_file(name), _ERRORS, _results, _CSV if name.endswith(".csv") else (b"null", b"[]", b"-1")
        )
        for target, name in TABLES.items()
    ),
    Target("run-csv", _own_table, (ReportError,), words=_CSV),
)
