# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron doctor` reports the truth about this machine and its Megatron; errors stay one printable line."""

from __future__ import annotations

import argparse
import errno
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from simreg_megatron import cli
from simreg_megatron.cli import doctor
from simreg_megatron.config.flags import add_simreg_arguments
from simreg_megatron.cpu.installed import broken_transformer_engine
from simreg_megatron.notices import SentenceError, one_line
from simreg_megatron.plugin import compat
from simreg_megatron.tools.tokens import DataError
from tests.helpers import jobs
from tests.helpers.old_torch import OLD_TORCH
from tests.megatron import runs
from tools.flags_page import described_flags, flags_page

Captured = pytest.CaptureFixture[str]


def test_doctor_without_torch_says_so_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor.sys, "path", [])
    said = cli.main(["doctor"]) == 1 and capsys.readouterr().out
    assert said and "missing: SimReg needs it" in said and "torch cannot be imported (import of torch halted" in said


@pytest.mark.megatron
def test_a_forked_worker_can_be_ended() -> None:
    """It would inherit a SIGTERM that raises, and libraries swallow that."""
    code = "import os, signal; from simreg_megatron import cli; cli.main(['doctor'])\n"
    code += "child = os.fork()\nif not child: os._exit(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)\n"
    code += "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    assert jobs.run([sys.executable, "-c", code]).returncode == 0


def doctor_here() -> None:
    sys.exit(cli.main(["doctor"]))


@pytest.mark.megatron
def test_doctor_finds_the_seams(tmp_path: Path) -> None:
    done = runs.forked(doctor_here, folder=tmp_path)
    assert done.status == 0, done.output
    assert "GPTModel._postprocess" in done.output and "missing" not in done.output
    assert "SimReg can be installed" in done.output


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("works", [True, False])
def test_doctor_trains_a_step(works: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what `doctor --gpu` starts on a GPU, here on the CPU; or with a fault of its own."""
    monkeypatch.setenv("SIMREG_CPU", "1")
    if not works:
        monkeypatch.setattr(doctor, "_ONE_STEP", [*doctor._ONE_STEP, "--num-attention-heads", "3"])
    assert doctor._train_one_step() == works
    said = capsys.readouterr().out
    if works:
        assert said.startswith("A step of a tiny model: ") and "simreg loss: " in said and "lm loss: " in said
    else:
        assert "A step of a tiny model failed" in said and "hidden_size" in said and "ChildFailedError" not in said


def doctor_without_a_seam() -> None:
    import megatron.training.training as training

    del training.training_log
    sys.exit(cli.main(["doctor"]))


@pytest.mark.megatron
def test_doctor_fails_where_a_seam_is_missing(tmp_path: Path) -> None:
    done = runs.forked(doctor_without_a_seam, folder=tmp_path)
    assert done.status == 1
    assert "missing" in done.output and "SimReg cannot be installed" in done.output


def doctor_without_a_training_loop() -> None:
    compat.has_training_loop = lambda: False  # this process ends after it
    sys.exit(cli.main(["doctor"]))


@pytest.mark.megatron
def test_doctor_of_wheels_without_a_training_loop(tmp_path: Path) -> None:
    """Those before 0.17: loops of one's own can have SimReg there."""
    done = runs.forked(doctor_without_a_training_loop, folder=tmp_path)
    said = " ".join(done.output.split())
    assert done.status == 0 and "missing" not in said and "megatron.training.arguments" not in said
    assert "install(config=" in said and "put the Megatron-LM source tree of this release on PYTHONPATH" in said


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("import simreg_megatron\nsimreg_megatron.install()\npretrain()", ["It installs SimReg itself."]),
        ("from simreg_megatron import install\ninstall()\nparse_args()", ["It installs SimReg itself."]),
        ("from megatron.training import pretrain\npretrain()", ["It does not mention SimReg: start it with"]),
        ("model(x)", ["It does not mention SimReg", "It never parses Megatron's flags"]),
        ("pretrain(); GPTModel(x, output_processor=p)", ["It does not", "It names GPTModel", "It passes an output"]),
    ],
)
def test_doctor_reads_the_script(text: str, sentences: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text(text)
    _, *said = doctor._look_at_script(script)
    assert len(said) == len(sentences), said
    assert all(got.startswith(wanted) for got, wanted in zip(said, sentences, strict=True))
    assert sys.path[0] == str(tmp_path), "the Megatron next to the script comes first"


def test_the_page_of_flags_is_the_parsers() -> None:
    page = (Path(cli.__file__).parents[2] / "docs" / "flags.md").read_text()
    assert page == flags_page(), "make it again: python -m tools.flags_page > docs/flags.md"


def test_every_flag_has_one_sentence(capsys: Captured) -> None:
    described = [pair for found in described_flags().values() for pair in found]
    parser = add_simreg_arguments(argparse.ArgumentParser(add_help=False))
    assert [name.partition(" ")[0].partition("[")[0] for name, _ in described] == [
        action.option_strings[0] for group in parser._action_groups for action in group._group_actions
    ]
    for name, sentence in described:
        assert len(sentence) > 20 and sentence[0].isupper() and sentence.endswith(".") and ". " not in sentence, name
        assert "default" in sentence or name.startswith("--simreg-objective-options"), name
    assert cli.main(["flags"]) == 0
    said = capsys.readouterr().out
    assert all(name.partition("[")[0].partition(" ")[0] in said for name, _ in described)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (SentenceError("the flag: drop it"), 2, "error: the flag: drop it"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b"), 2, "error: /a/b: No space left on device"),
        (OSError("of a library"), 2, "error: of a library"),
        (ModuleNotFoundError(name="tensorboard.x"), 2, "error: tensorboard is not installed: in the clone's folder, "
         "pip install '.[report]'"),
        (KeyboardInterrupt(), 130, "Stopped."),
    ],
)  # fmt: skip
def test_how_a_command_ends(
    error: BaseException, status: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(doctor, "run", mock.Mock(side_effect=error))
    assert cli.main(["doctor"]) == status and capsys.readouterr() == ("", f"{sentence}\n")


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError("a fault of our own"), ModuleNotFoundError(name="unknown")):
        monkeypatch.setattr(doctor, "run", mock.Mock(side_effect=error))
        with pytest.raises(type(error)):
            cli.main(["doctor"])


@pytest.mark.parametrize(
    "text", ["a\nb", "a\x1b[2Jb", "a\ud800b", "a\u2028b"], ids=["line", "escape", "half", "separator"]
)
def test_terminal_codes_are_removed(text: str) -> None:
    line = one_line(text)
    assert line[0] + line[-1] == "ab" and line.isprintable() and line.encode()


def test_the_beginning_and_the_end_of_a_long_one_stay() -> None:
    line = one_line("begins " + "x" * 100_000 + " ends")
    assert line.startswith("begins ") and line.endswith(" ends") and len(line) < 1100


def test_an_error_travels_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(DataError("a\nb")))) == "a?b"


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget again what a test imports under these names."""
    names = ("transformer_engine", "transformer_engine.pytorch")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", None),
        ("raise OSError('lib.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal')", "nvidia-cublas>=13.2"),
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "built for another torch or CUDA"),
        ("raise RuntimeError", "built for another torch or CUDA"),
        (
            "raise OSError('te.so: undefined symbol: x, version libcudnn_graph.so.9')",
            "another cuDNN than torch: set CUDNN",
        ),
    ],
)
def test_the_reason_is_named(text: str, sentence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = broken_transformer_engine()
    assert found is None if sentence is None else sentence in str(found)


def test_the_other_apex_is_named_though_it_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert "NOT NVIDIA's" in doctor._apex_sentence()


@pytest.mark.skipif(OLD_TORCH, reason="torch came with another package of that name")
@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize("given", ["", "CUDNN_HOME", "CUDNN_PATH"])
def test_transformer_engine_loads_the_cudnn_of_torch(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader looks at CUDNN_HOME, then CUDNN_PATH, then at the system, and only then at torch's."""
    for name in ("nvidia", "nvidia.cudnn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.setenv(name, "/usr/local/cudnn") if name == given else monkeypatch.delenv(name, raising=False)
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "__init__.py").touch()
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (tmp_path / "transformer_engine" / "pytorch.py").write_text(
        "import os; raise OSError(os.environ.get('CUDNN_HOME') or os.environ['CUDNN_PATH'])"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert ("/usr/local/cudnn" if given else f"{tmp_path}/nvidia/cudnn") in str(broken_transformer_engine())
    monkeypatch.delenv("CUDNN_HOME", raising=False)
