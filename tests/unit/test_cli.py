# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron doctor` tells the truth about this machine, and about a Megatron without a seam."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from simreg_megatron import __version__, cli, doctor
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.arguments import add_simreg_arguments
from tests.helpers import jobs
from tests.megatron import runs


@pytest.mark.megatron
def test_doctor_finds_the_seams() -> None:
    done = jobs.run([sys.executable, "-m", "simreg_megatron.cli", "doctor"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80
    assert "GPTModel._postprocess" in done.stdout.replace("\n", "") and "missing" not in done.stdout
    assert "SimReg can be installed" in done.stdout


def test_doctor_without_torch_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == 1 and "missing: SimReg needs it" in done.output and "Traceback" not in done.output


def doctor_without_a_seam() -> None:
    import megatron.training.training as training

    del training.training_log
    cli.app(["doctor"])


@pytest.mark.megatron
def test_doctor_fails_where_a_seam_is_missing(tmp_path: Path) -> None:
    done = runs.forked(doctor_without_a_seam, folder=tmp_path)
    assert done.status == 1
    assert "missing" in done.output and "SimReg cannot be installed" in done.output


def doctor_without_a_training_loop() -> None:
    compat.has_training_loop = lambda: False  # this process ends after it
    cli.app(["doctor"])


@pytest.mark.megatron
def test_doctor_of_wheels_without_a_training_loop(tmp_path: Path) -> None:
    """Those before 0.17: loops of one's own can have SimReg there."""
    done = runs.forked(doctor_without_a_training_loop, folder=tmp_path)
    said = " ".join(done.output.split())
    assert done.status == 0 and "missing" not in said and "megatron.training.arguments" not in said
    assert "install(config=" in said and "put the Megatron-LM source tree of this release on PYTHONPATH" in said


@pytest.mark.megatron
def test_doctor_trains_a_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what `doctor --gpu` starts on a GPU, here on the CPU; then with a fault of its own."""
    monkeypatch.setenv("SIMREG_CPU", "1")
    doctor._train_one_step(Console(markup=False))
    said = capsys.readouterr().out
    assert said.startswith("A step of a tiny model: ") and "simreg loss: " in said and "lm loss: " in said
    monkeypatch.setattr(doctor, "_ONE_STEP", [*doctor._ONE_STEP, "--num-attention-heads", "3"])
    with pytest.raises(typer.Exit):
        doctor._train_one_step(Console(markup=False))
    said = capsys.readouterr().out
    assert "A step of a tiny model failed" in said and "hidden_size" in said and "ChildFailedError" not in said


@pytest.mark.parametrize(
    ("present", "sentence"),
    [
        (set(), "apex: not installed"),
        ({"apex"}, "apex: NOT NVIDIA's"),
        ({"apex", "apex.optimizers", "apex.normalization"}, "apex: NVIDIA's."),
    ],
)
def test_which_apex(present: set[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if name in present else None)
    assert doctor._apex_sentence().startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("import simreg_megatron\nsimreg_megatron.install()\npretrain()", ["It installs SimReg itself."]),
        ("from simreg_megatron import install\ninstall()\nparse_args()", ["It installs SimReg itself."]),
        ("from megatron.training import pretrain\npretrain()", ["It does not mention SimReg: start it with"]),
        ("model(x)", ["It does not mention SimReg", "It never parses Megatron's flags"]),
        ("pretrain(); model(x, output_processor=p)", ["It does not mention", "It passes an output processor"]),
    ],
)
def test_doctor_reads_the_script(text: str, sentences: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text(text)
    _, *said = doctor._look_at_script(script)
    assert len(said) == len(sentences), said
    assert all(got.startswith(wanted) for got, wanted in zip(said, sentences, strict=True))
    assert sys.path[0] == str(tmp_path), "the Megatron beside the script comes first"


def test_doctor_says_which_tree_a_script_would_use(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "train.py").write_text("")
    first, *_ = doctor._look_at_script(tmp_path / "train.py")
    assert str(tmp_path) in first.partition("with Megatron from")[2]


@pytest.mark.parametrize("content", [None, "def (:"])
def test_doctor_refuses_what_is_no_script(content: str | None, tmp_path) -> None:
    script = tmp_path / "train.py"
    if content is not None:
        script.write_text(content)
    done = jobs.run([sys.executable, "-m", "simreg_megatron.cli", "doctor", "--script", str(script)])
    assert done.returncode == 2 and "cannot read" in done.stderr and "Traceback" not in done.stderr


def test_a_script_without_the_option_is_taken_as_one(tmp_path) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", str(tmp_path / "train.py")])
    assert done.exit_code == 2 and "cannot read" in done.stderr


def test_a_command_of_a_group_is_found_for_whoever_leaves_the_group_out() -> None:
    done = CliRunner().invoke(cli.app, ["prepare", "texts", "--out", "x"])
    assert done.exit_code == 2 and "did you mean `simreg-megatron data prepare`?" in " ".join(done.stderr.split())


def test_the_version() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"simreg-megatron {__version__}\n"


def test_the_page_of_flags_is_the_parsers() -> None:
    page = (Path(cli.__file__).parents[1] / "docs" / "flags.md").read_text()
    assert page == cli.flags_page(), "make it again: simreg-megatron flags --markdown > docs/flags.md"


def test_every_flag_has_one_sentence() -> None:
    told = [pair for found in cli._described_flags().values() for pair in found]
    parser = add_simreg_arguments(argparse.ArgumentParser(add_help=False))
    assert [name.partition(" ")[0].partition("[")[0] for name, _ in told] == [
        action.option_strings[0] for group in parser._action_groups for action in group._group_actions
    ]
    for name, sentence in told:
        assert len(sentence) > 20 and sentence[0].isupper() and sentence.endswith(".") and ". " not in sentence, name
        assert "default" in sentence or name.startswith("--simreg-objective-options"), name
    said = CliRunner().invoke(cli.app, ["flags"]).stdout
    assert all(name in said for name, _ in told) and max(map(len, said.splitlines())) <= 100


def test_missing_packages_are_named_as_pip_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from simreg_megatron.checkpoint import commands as conversion
    from simreg_megatron.evaluation import commands as evaluation

    for where in ("importlib.util.find_spec", "simreg_megatron.evaluation.commands.find_spec"):
        monkeypatch.setattr(where, lambda name: None)
    with pytest.raises(ValueError, match=r"pip install transformers safetensors$"):
        conversion._need_transformers()
    with pytest.raises(ValueError, match=r"pip install 'lm-eval\[hf\]>=0.4.13' transformers$"):
        evaluation._need_packages()


def test_doctors_last_word_goes_with_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(doctor, "_seams", lambda: (Table(), True))
    (folder := tmp_path / "x[red]").mkdir()
    for text, last in (("from simreg_megatron import install", "into this Megatron."), ("pretrain()", "lambda auto.")):
        (folder / "train.py").write_text(text)
        said = " ".join(CliRunner().invoke(cli.app, ["doctor", str(folder / "train.py")]).stdout.split())
        assert "x[red]" in said and said.endswith(last)


def test_doctor_takes_one_question(tmp_path: Path) -> None:
    for words in (["--gpu", "a.py"], ["--script", "a.py", "b.py"]):
        done = CliRunner().invoke(cli.app, ["doctor", *words])
        assert done.exit_code == 2 and "give one script, or --gpu alone" in done.stderr


def test_letters_that_the_terminal_lacks_end_nothing() -> None:
    done = jobs.run(
        [sys.executable, "-m", "simreg_megatron.cli", "report", "\u00e9=none.csv"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_every_command_has_its_help() -> None:
    """Whatever click the lowest typer meets."""
    commands = [(["--help"], typer.main.get_command(cli.app))]
    for words, command in commands:
        said = CliRunner().invoke(cli.app, words)
        assert said.exit_code == 0 and "Usage" in said.stdout, words
        commands += [([*words[:-1], name, "--help"], part) for name, part in getattr(command, "commands", {}).items()]
    assert len(commands) > 15
