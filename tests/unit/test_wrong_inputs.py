# SPDX-License-Identifier: Apache-2.0
"""What a newcomer gets wrong in the first hour: command, exit status and the first line that is printed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch import launcher, preflight
from launch.slurm import submit
from simreg_megatron.cli import app
from simreg_megatron.data.encoding import write_dataset
from simreg_megatron.data.tokenizer import train_tokenizer
from tests.helpers.preparation import TEXTS, lines

Ask = Callable[[str], tuple[int, str]]
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "SIMREG_CPU": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/mine: a set of two sides with its tokenizer; data/few: documents of which none validates."""
    root = tmp_path_factory.mktemp("place")
    mine = root / "data" / "mine"
    mine.mkdir(parents=True)
    train_tokenizer(TEXTS, mine / "tokenizer.model", vocab_size=350)
    for side in ("train", "valid"):
        write_dataset(mine / side, TEXTS, mine / "tokenizer.model")
    (root / "few.jsonl").write_bytes(lines(TEXTS[:3]))
    (root / "notes.txt").write_text("no folder")
    (root / "README.md").write_text("# no tokenizer\n")
    (root / "cpu.env").write_text("GPUS_PER_NODE=0\nTIME=60\n")
    return root


@pytest.fixture
def ask(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """(status, first line of the error, or of all that was said) of a command, in this process."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(preflight, "check_with_megatron", lambda *_, **__: None)  # imports it for good; asked below
    monkeypatch.setattr(launcher, "_prepare", lambda _: pytest.fail("it was not refused, and Megatron would start"))
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)

    def asked(line: str) -> tuple[int, str]:
        program, *words = shlex.split(line)
        capsys.readouterr()
        if program == "simreg-megatron":
            done = CliRunner().invoke(app, words)
            status, said, erred = done.exit_code, done.stdout, done.stderr
            both = capsys.readouterr()
            said, erred = said + both.out, erred + both.err
        else:
            ranks = "1"
            if program.isdecimal():  # so many ranks
                ranks, (program, *words) = program, words
            monkeypatch.setenv("WORLD_SIZE", ranks)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
            monkeypatch.setattr(sys, "argv", [program, *words])
            monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)  # pytest's own Ctrl-C stays
            try:
                submit.main() if program == "submit" else launcher.main(program)
                status = 0
            except SystemExit as ended:
                status = int(ended.code or 0)
            said, erred = capsys.readouterr()
        return status, ((erred or said).strip().splitlines() or [""])[0]

    return asked


OWN = "--data data/mine/train --tokenizer data/mine/tokenizer.model"
SUBMIT = "submit --cluster cpu.env launch/pretrain_llama.sh --save-interval 5 --output out"
FLAGS = [
    ("--simreg-lamda 10", "there is no flag --simreg-lamda: did you mean --simreg-lambda?"),
    ("--simreg-lambda ten", "SimReg lambda must be a finite number of 0 or more, or auto, not ten"),
    ("--simreg-objective foo --simreg-lambda 1", "unknown SimReg objective 'foo': choose from simreg, "),
    ("--simreg-lambda 1 --simreg-chunk-size -3", "the SimReg chunk size must be at least 2 tokens"),
    ("--simreg-lambda 1 --simreg-chunk-size big", "argument --simreg-chunk-size: invalid int value: 'big'"),
    ("--simreg-lambda 1 --simreg-layers 7", "--simreg-layers 7 is beyond the model, which has layers 1 to 4"),
    ("--simreg-scope local", "--simreg-scope has no effect while --simreg-lambda is 0"),
    ("--adagc-beta 0.9", "--adagc-beta has no effect without --adagc"),
    ("--recipe baseline --simreg-lambda 10", "--recipe baseline trains on cross-entropy alone, and --simreg-lambda 10"),
    ("--simreg-lambda 1 --simreg-impl triton", "--simreg-impl triton needs a GPU and this run has none"),
]


@pytest.mark.parametrize(("words", "sentence"), FLAGS)
@pytest.mark.parametrize("command", ["llama", "llama --dry-run", SUBMIT])
def test_flags_and_values(command: str, words: str, sentence: str, ask: Ask) -> None:
    """The dry run, the run and the submission ask the same."""
    refused(ask, f"{command} {words}", sentence)


def refused(ask: Ask, command: str, sentence: str) -> None:
    status, line = ask(command)
    assert status == 2 and line.startswith(f"error: {sentence}"), (status, line)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("4 llama --pipeline-model-parallel-size 4 --num-layers 33", "33 layers cannot be shared out evenly among 4 "
         "pipeline stages: give --num-layers 32 or 36, or a --pipeline-model-parallel-size of 1, 3, 11 or 33"),
        ("8 llama --tensor-model-parallel-size 8 --num-attention-heads 36", "36 attention heads cannot be shared out "
         "among 8 tensor-parallel ranks: give a --tensor-model-parallel-size of 1, 2, 3, 4, 6, 9, 12, 18 or 36"),
        ("128 llama --pipeline-model-parallel-size 3 --num-layers 33", "one replica takes TP 1 x PP 3 x CP 1 = 3 "
         "ranks, and 128 cannot be shared out among replicas: start 126 ("),
        ("1 llama --tensor-model-parallel-size 2", "one replica takes TP 2 x PP 1 x CP 1 = 2 ranks, and 1 cannot be "
         "shared out among replicas: start 2 (--nproc-per-node, --nnodes), or leave these sizes out"),
        ("4 llama --tensor-model-parallel-size 4 --group-query-attention --num-query-groups 3", "3 query groups"),
        ("1 llama --num-attention-heads 7", "--hidden-size 192 cannot be cut into 7 attention heads"),
        ("2 llama --expert-model-parallel-size 2", "--expert-model-parallel-size 2 has no experts to share out"),
        ("4 mixtral --expert-model-parallel-size 3", "4 experts cannot be shared out among 3 ranks"),
        ("4 mixtral --expert-model-parallel-size 4 --pipeline-model-parallel-size 2", "the experts of one model take"),
        ("1 llama --micro-batch-size 3", "each of 1 data-parallel ranks has 8 sequences of the global batch, which "
         "micro-batches of 3 cannot share: give --micro-batch-size 2"),
        ("4 llama --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "a pipeline stage has"),
    ],
)  # fmt: skip
def test_sizes_over_ranks(command: str, sentence: str, ask: Ask) -> None:
    refused(ask, command, sentence)


def test_sizes_that_stages_share_otherwise_are_megatrons(ask: Ask) -> None:
    uneven = "--pipeline-model-parallel-size 4 --num-layers 33 --decoder-first-pipeline-num-layers 9"
    assert ask(f"4 llama {uneven} --dry-run")[0] == 0


PATHS = [
    ("data/mine/train.bin", "data/mine/train.bin is one file of a pair: give the prefix of both, data/mine/train"),
    ("data/mine", "data/mine is a folder, and a prefix is needed: data/mine/train (there is also valid)"),
    ("data", "data is a folder, and holds no prepared set"),
    ("data/mine/trian", "there is no data/mine/trian.bin: did you mean data/mine/train?"),
    ("data/zzz/train", "there is no folder data/zzz"),
    ("data/mine/other", "there is no data/mine/other.bin: data/mine is a folder, and a prefix is needed"),
]


@pytest.mark.parametrize(("path", "sentence"), PATHS)
@pytest.mark.parametrize("command", [SUBMIT, "simreg-megatron data histogram"])
def test_prefixes(command: str, path: str, sentence: str, ask: Ask) -> None:
    words = path if "histogram" in command else f"--data {path} --tokenizer data/mine/tokenizer.model"
    refused(ask, f"{command} {words}", sentence)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("llama --output notes.txt", "--output notes.txt: "),
        ("llama --output notes.txt/run", "--output notes.txt/run: "),
        ("llama --dry-run --output notes.txt", "--output notes.txt: "),
        (f"{SUBMIT} --output notes.txt", "--output notes.txt: "),
        ("llama --save-interval 2", "--save-interval needs --output DIR"),
        (SUBMIT.replace("--save-interval 5", ""), "a run that goes on (--auto-resume, and every submitted one) needs "
         "--save-interval N"),
        (SUBMIT.replace("launch", "--reserve 60 launch"), "TIME in cpu.env, 60 leaves less than a minute besides"),
    ],
)  # fmt: skip
def test_output_and_saving(command: str, sentence: str, ask: Ask) -> None:
    refused(ask, command, sentence)


def test_an_output_that_cannot_be_written(ask: Ask, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(The tests may run as root, who may write anywhere.)"""
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: path != place)
    status, line = ask("llama --output run/here")
    assert (status, line) == (2, f"error: --output run/here: nothing can be written in {place}: name another folder")


def test_a_dry_run_previews_without_data(ask: Ask, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(launcher, "_say", said.append)
    assert ask("llama --dry-run --data data/mine/trian --tokenizer data/mine/tokenizer.model")[0] == 0
    assert "--train-iters" in said[0] and "SimReg is off, as no flag asks for it" in said[0]
    assert said[1].startswith(
        "# note      the run itself would be refused on this machine: there is no data/mine/trian"
    )
    assert ask(f"llama {OWN.replace('train', 'trian')}")[0] == 2, "the run itself"
    said.clear()
    monkeypatch.delenv("SIMREG_CPU")
    assert ask("llama --dry-run --model 350m --simreg-lambda auto")[0] == 0
    assert "--data-path PREFIX" in said[1] and said[-1].endswith("no --data is given")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "off"),
        ("--plain", "left out, with all of the plugin"),
        ("--simreg-objective none", "measured, not trained on"),
        ("--simreg-lambda auto", "simreg, lambda 4.33013 (auto)"),  # 10 * sqrt(192 / 1024)
        ("--simreg-objective simreg:auto,sigreg:0.05", "simreg, lambda 4.33013 (auto), sigreg, lambda 0.05"),
    ],
)
def test_a_dry_run_says_what_lambda_comes_to(words: str, sentence: str, ask: Ask, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(launcher, "_say", said.append)
    assert ask(f"llama --dry-run {words}")[0] == 0
    assert f"# simreg    {sentence}" in said[0].splitlines()


def test_submitting_without_simreg_is_said(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    off = "> SimReg is off, as no flag asks for it: --simreg-lambda auto, or --recipe paper, turns it on"
    dry = SUBMIT.replace("launch/", "--dry-run launch/", 1)
    assert ask(dry) == (0, off)
    assert ask(f"{dry} --simreg-lambda 1")[1] != off != ask(f"{dry} --recipe baseline")[1]


def test_few_documents_make_no_validation_set_and_that_is_said(ask: Ask, place: Path, capsys) -> None:
    words = "few.jsonl --tokenizer data/mine/tokenizer.model --out data/few --workers 1"
    assert ask(f"simreg-megatron data prepare {words}")[0] == 0
    assert not (place / "data" / "few" / "valid.idx").exists()
    done = CliRunner().invoke(app, ["data", *shlex.split(f"prepare {words}")])
    assert "notice: there is no validation set, since --valid-share 0.005 chose none of 3 documents" in done.stdout
    few = "llama --seq-length 64 --data data/few/train --tokenizer data/mine/tokenizer.model"
    refused(ask, f"{few} --valid-data data/few/valid", "the set in data/few has no validation text: leave --valid-data")
    # Megatron itself would look for a validation document for ever.
    refused(ask, few, "data/few/train holds 3 documents, and --split 99,1,0 leaves none of them to validate: give")
    refused(ask, f"{few} --split 90,10,0", "data/few/train holds 3 documents, and --split 90,10,0 leaves none")
    refused(ask, f"{few} --split 0,1,1", "data/few/train")
    assert ask(f"{few} --split 2,1,0 --dry-run")[0] == 0 == ask(f"{few} --split 100,0,0 --dry-run")[0]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("llama --data data/mine/train --tokenizer README.md", "README.md is a file and no .model: give a sentence"),
        ("simreg-megatron data prepare few.jsonl --out data/new --tokenizer README.md", "README.md is a file and no "),
        ("simreg-megatron data prepare few.jsonl --out README.md --tokenizer x.model", "--out README.md is a file"),
        ("simreg-megatron data prepare facts --out data/new --tokenizer data/mine/tokenizer.model", "facts holds "
         "nothing that can be read: give a .jsonl (also .jsonl.gz, .jsonl.zst), .parquet or .txt file, a folder of "
         "them, hf:NAME, or c4; .json files are read where they are named themselves"),
        ("simreg-megatron export-hf --load out/run --save model", "out/run is the folder of a run: give its "
         "checkpoints, out/run/checkpoints"),
    ],
)  # fmt: skip
def test_words_in_the_place_of_others(command: str, sentence: str, ask: Ask, place: Path) -> None:
    for path in ("facts/a.json", "out/run/checkpoints/latest_checkpointed_iteration.txt"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text("2")
    refused(ask, command, sentence)


def test_skipping_goes_on_with_what_is_done(ask: Ask, place: Path) -> None:
    """The refusal of a broken line names a way out, and that way must be open."""
    (place / "broken.jsonl").write_bytes(lines(TEXTS[:40]) + b"{\n" + lines(TEXTS[40:50]))
    words = (
        "data prepare broken.jsonl --tokenizer data/mine/tokenizer.model --out data/broken --workers 1 --block-size 1K"
    )
    status, line = ask(f"simreg-megatron {words}")
    assert status == 2 and "or add --on-error skip" in line, line
    assert any((place / "data" / "broken" / "parts" / "train").iterdir()), "some parts are done"
    assert ask(f"simreg-megatron {words} --on-error skip")[0] == 0
    refused(ask, f"simreg-megatron {words}", "data/broken was begun with other settings (on_error")
