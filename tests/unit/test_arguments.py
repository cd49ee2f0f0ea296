# SPDX-License-Identifier: Apache-2.0
"""The flags in a parser, their refusals, and the comparison with a checkpoint's flags."""

import argparse
import sys
from functools import partial
from pathlib import Path

import pytest

from simreg_megatron import SimRegConfig, install
from simreg_megatron.config import flags as ours
from simreg_megatron.config.flags import adagc_from_args, add_simreg_arguments, config_from_args
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.plugin import installation, loop

differences_to_checkpoint = partial(ours.differences, ours.SIMREG_FLAGS, config_from_args)
adagc_differences = partial(ours.differences, ours.ADAGC_FLAGS, adagc_from_args)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--yaml-cfg")
    made.add_argument("--num-layers", type=int)
    made.add_argument("--clip-grad", type=float, default=1.0)  # Megatron's own
    return add_simreg_arguments(made)


def test_models_are_checked_against_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_installation", None)
    with pytest.raises(ValueError, match=r"models are checked against settings: pass both, install\(config="):
        install(models=[object()])


def test_flags_become_one_config() -> None:
    args = parser().parse_args(["--simreg-lambda", "auto", "--simreg-temperature", "0.05", "--simreg-chunk-size", "0"])
    config = config_from_args(args)
    assert (config.lambda_, config.temperature, config.chunk_size, config.scope) == ("auto", 0.05, 0, "exact")


def test_defaults_are_off() -> None:
    assert not config_from_args(parser().parse_args([])).active
    assert not config_from_args(argparse.Namespace()).active, "a namespace from elsewhere has no such settings"


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")
def test_settings_are_read_from_a_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron puts the file's top-level keys in the place of all flags."""
    from megatron.training.arguments import parse_args

    file = tmp_path / "run.yaml"
    megatrons = "disable_msc_deprecated: false\nenable_msc: false\n"  # what its parser asks for at once
    file.write_text(megatrons + "simreg_lambda: 10\nsimreg_chunk_size: 512\nsimreg_document_mask: true\n")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", str(file)])
    config = config_from_args(parse_args(add_simreg_arguments))
    assert (config.lambda_, config.chunk_size, config.document_mask, config.scope) == (10, 512, True, "exact")


BAD_FLAGS = [
    ("--simreg-chunk-size 64", "SimReg chunk size 64 has no effect while lambda is 0"),
    ("--simreg-cpu", "--simreg-cpu came too late"),
    ("--yaml-cfg x.yaml --simreg-lambda 10", "write them into the YAML file"),
    ("--adagc-lambda 1", "did you mean --adagc-lambda-"),
    ("--simreg-zzz", "`simreg-megatron flags` lists them"),
    (f"--simreg-warmup-iters {'9' * 5000}", "argument --simreg-warmup-iters: invalid int value: '999"),
    (f"--simreg-lambda 1 --simreg-scope {'x' * 5000}", "unknown SimReg scope 'xxx"),
    ("--simreg-objective mic:1 --simreg-scope \x1b[2J", "SimReg scope ?[2J has no effect"),
    ("--simreg-lambda 1 --simreg-lambda-schedule linear:1e308", "ends at a share from 0 to 1,000, not '1e308'"),
    ("--simreg-objective sce --simreg-lambda 1 --simreg-objective-options coupling=2", "coupling must be from 0 to 1"),
    (
        "--simreg-objective sce --simreg-lambda 1 --simreg-objective-options exclude_self=yes,target=instance",
        "use target=label",
    ),
]


@pytest.mark.parametrize(("line", "sentence"), BAD_FLAGS)
def test_bad_flags_end_with_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(line.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1 and len(error) < 1100


def test_settings_of_a_yaml_file_without_a_lambda_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parser of ours has seen them."""
    monkeypatch.setattr(installation.compat, "arguments", lambda: argparse.Namespace(simreg_objective="creg"))
    with pytest.raises(ValueError, match="SimReg objective creg has no effect while lambda is 0"):
        installation.Installation(None, lambda _: ()).regularizer()
    monkeypatch.setattr(installation.compat, "arguments", lambda: argparse.Namespace(adagc_beta=0.9))
    monkeypatch.setattr(installation, "_installation", installation.Installation(None, lambda _: ()))
    with pytest.raises(ValueError, match="--adagc-beta has no effect without --adagc"):
        loop.set_up(lambda: None)


def test_installing_settings_without_a_lambda_is_refused() -> None:
    with pytest.raises(ValueError, match="SimReg objective creg has no effect while lambda is 0: give a lambda,"):
        install(config=SimRegConfig(objective="creg"))
    assert installation.installed() is None


def test_other_flags_are_argparses_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--num-layers", "x"])
    assert "usage: " in (error := capsys.readouterr().err) and "--num-layers: invalid int value: 'x'" in error


def test_a_wrong_flag_is_refused_where_a_script_passes_over_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert parser().parse_known_args(["--of-the-script", "--simreg-layers", "4", "--simreg-lambda", "1",
                                      "--num-layers", "4"])[1] == ["--of-the-script"]  # fmt: skip
    with pytest.raises(SystemExit):
        parser().parse_known_args(["--of-the-script", "--simreg-lamda", "10"])
    assert "did you mean --simreg-lambda?" in capsys.readouterr().err


def test_a_percent_sign_in_a_help_text_is_printed() -> None:
    """Megatron 0.19 has one, and argparse raises ValueError at it."""
    made = argparse.ArgumentParser()
    made.add_argument("--ratio", default=3, help="share (50%), or 100% of it, escaped %%, default %(default)s")
    with pytest.raises(ValueError, match="unsupported format character"):
        made.format_help()
    add_simreg_arguments(made)
    for _ in range(2):
        assert "share (50%), or 100% of it, escaped %, default 3" in " ".join(made.format_help().split())


class TestOnTheCpu:
    """Without a GPU, a script of one's own gets the settings that the launch scripts choose."""

    def parsed(self, line: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
        monkeypatch.setattr(cpu_backend, "is_active", lambda: True)
        made = argparse.ArgumentParser(allow_abbrev=False)
        made.add_argument("--distributed-backend", default="nccl", choices=["nccl", "gloo"])
        made.add_argument("--no-rope-fusion", dest="apply_rope_fusion", action="store_false")
        made.add_argument("--num-workers", type=int, default=2)
        made.add_argument("--async-save", action="store_true")
        return add_simreg_arguments(made).parse_args(line.split())

    def test_the_flags_that_go_with_it_are_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        args = self.parsed("", monkeypatch)
        assert (args.distributed_backend, args.apply_rope_fusion, args.num_workers) == ("gloo", False, 0)
        assert self.parsed("--num-workers 3", monkeypatch).num_workers == 3

    @pytest.mark.parametrize(
        "line", ["--distributed-backend nccl", "--simreg-lambda 1 --simreg-impl triton", "--async-save"]
    )
    def test_what_needs_a_gpu_is_refused(self, line: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(SystemExit):
            self.parsed(line, monkeypatch)
        assert "needs a GPU, and this run is on the CPU: leave the flag out" in capsys.readouterr().err


def test_a_resume_logs_every_setting_that_changed() -> None:
    before = parser().parse_args(["--simreg-lambda", "10", "--simreg-temperature", "0.02"])
    now = parser().parse_args([])
    lines = differences_to_checkpoint(before, now)
    assert len(lines) == 2
    assert lines[0].startswith("--simreg-lambda was 10.0 when the checkpoint was written and is 0.0 now (its default")
    assert lines[1].startswith("--simreg-temperature was 0.02")
    assert differences_to_checkpoint(before, before) == []
    assert differences_to_checkpoint(argparse.Namespace(), before) == [], "a checkpoint from before the plugin"


NORMS = [("", 1.0), ("--clip-grad 0.5", 0.5), ("--clip-grad 0", 1.0), ("--adagc-lambda-abs 2", 2.0)]


@pytest.mark.parametrize(("flags", "norm"), NORMS)
def test_adagc_takes_the_place_of_the_global_clip(flags: str, norm: float) -> None:
    config = adagc_from_args(parser().parse_args(["--adagc", *flags.split()]))
    assert config is not None and config.lambda_abs == norm
    assert adagc_from_args(parser().parse_args([])) is None


CHANGES_OF_ADAGC = [
    ("--adagc", "", "--adagc was on when the checkpoint was written and is off now"),
    ("", "--adagc", "--adagc was off when the checkpoint was written and is on now"),
    ("--adagc --adagc-beta 0.9", "--adagc", "--adagc-beta was 0.9 when the checkpoint was written and is 0.99 now"),
]


@pytest.mark.parametrize(("before", "now", "line"), CHANGES_OF_ADAGC)
def test_a_resume_logs_what_changed_of_adagc(before: str, now: str, line: str) -> None:
    both = parser().parse_args(before.split()), parser().parse_args(now.split())
    lines = adagc_differences(*both)
    assert differences_to_checkpoint(*both) == []
    assert len(lines) == 1 and lines[0].startswith(line), lines


class TestAnUnreadableRecord:
    """SimReg's settings in a checkpoint, from a newer version, or damaged."""

    RECORDS = (
        ({"simreg_objective": "of-the-future"}, "SimReg", "--simreg-lambda 1"),
        ({"simreg_objective": 5, "simreg_chunk_size": "\x1b["}, "SimReg", "--simreg-lambda 1"),
        ({"simreg_lambda": 1, "simreg_layers": object()}, "SimReg", "--simreg-objective none"),
        ({"simreg_lambda": None, "adagc": True, "adagc_beta": "half"}, "AdaGC", "--adagc"),
    )

    def resume(self, record: dict, line: str, monkeypatch: pytest.MonkeyPatch) -> object:
        monkeypatch.setattr(loop.compat, "arguments", lambda: parser().parse_args(line.split()))
        monkeypatch.setattr(installation, "_installation", installation.Installation(None, lambda _: ()))
        recorded = argparse.Namespace(**{"simreg_lambda": 1, **record})
        return loop.compare_with_checkpoint(lambda _: "goes on", recorded)

    @pytest.mark.parametrize(("record", "name", "line"), RECORDS)
    def test_a_run_resumes_and_says_so(self, record, name, line, monkeypatch) -> None:
        for flags in ("", line):
            with pytest.warns(UserWarning, match=f"settings of {name} cannot be read .* the flags decide") as caught:
                assert self.resume(record, flags, monkeypatch) == "goes on"
            assert len(caught) == 1 and str(caught[0].message).isprintable()
