# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a newcomer's first hour: command, exit status and the first line that is printed."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import launcher, preflight
from launch.planned import python_path
from launch.slurm import submit
from simreg_megatron import cli
from simreg_megatron.tools.builtin_corpus import write_pair
from simreg_megatron.tools.tokens import train_tokenizer
from tests.helpers import jobs
from tests.helpers.texts import TEXTS, lines

ROOT = Path(__file__).resolve().parents[2]
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
        write_pair(mine / side, TEXTS, mine / "tokenizer.model")
    (root / "few.jsonl").write_bytes(lines(TEXTS[:3]))
    (root / "notes.txt").write_text("no folder")
    (root / "README.md").write_text("# no tokenizer\n")
    (root / "cpu.env").write_text("GPUS_PER_NODE=0\nTIME=60\n")
    for path in ("facts/a.json", "out/run/checkpoints/latest_checkpointed_iteration.txt"):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text("2")
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
        ranks, program, *words = ("1", *shlex.split(line))
        if program.isdecimal():  # the number of ranks
            ranks, program, *words = program, *words
        monkeypatch.setenv("WORLD_SIZE", ranks)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setattr(sys, "argv", [program, *words])
        monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)  # pytest's own Ctrl-C stays
        capsys.readouterr()
        start = {"submit": submit.main, "simreg-megatron": lambda: cli.main(words)}.get(program)
        try:
            status = start() if start else launcher.main(program)
        except SystemExit as ended:
            status = ended.code
        said, erred = capsys.readouterr()
        text = (erred or said).strip()
        old = "No CUDA runtime is found"  # said by some releases of torch, which is no error
        line = next((each for each in text.splitlines() if not each.startswith(old)), "")
        return int(status or 0), " ".join(text.split()) if line.lower().startswith("usage: ") else line

    return asked


OWN = "--data data/mine/train --tokenizer data/mine/tokenizer.model"
SUBMIT = "submit --cluster cpu.env launch/pretrain_llama.sh --save-interval 5 --output out"
FLAGS = [
    ("--simreg-lamda 10", "there is no flag --simreg-lamda: did you mean --simreg-lambda?"),
    ("--simreg-lambda 1 --simreg-chunk-size 1", "SimReg chunk size must be 0, or 2 or more, not 1"),
    ("--adagc-beta 0.9", "--adagc-beta has no effect without --adagc"),
]


@pytest.mark.parametrize(("words", "sentence"), FLAGS)
@pytest.mark.parametrize("command", ["llama", "llama --dry-run", SUBMIT])
def test_flags_and_values(command: str, words: str, sentence: str, ask: Ask) -> None:
    """The dry run, the run and the submission ask the same."""
    refused(ask, f"{command} {words}", sentence)


def refused(ask: Ask, command: str, sentence: str) -> None:
    status, line = ask(command)
    assert status == 2 and line.startswith(f"error: {sentence}"), (status, line)


SIZES_AND_WORDS = [
    ("128 llama --pipeline-model-parallel-size 3 --num-layers 33", "one replica takes TP 1 x PP 3 x CP 1 = 3 "
     "ranks, and 128 cannot be divided among replicas: start 24 ("),
    ("1 llama --tensor-model-parallel-size 2", "one replica takes TP 2 x PP 1 x CP 1 = 2 ranks, and 1 cannot be "
     "divided among replicas: start 2 (--nproc-per-node), or give smaller sizes"),
    ("1 llama --micro-batch-size 3", "each of 1 data-parallel ranks has 8 sequences of the global batch, which "
     "micro-batches of 3 cannot share: give --micro-batch-size 2"),
    ("llama --save-interval 2", "--save-interval needs --output DIR"),
    (SUBMIT.replace("--save-interval 5", ""), "a run that can resume (--auto-resume, and every submitted one) "
     "needs --save-interval N"),
    ("llama --data data/mine/train --tokenizer README.md", "README.md cannot be loaded as a tokenizer"),
    ("simreg-megatron data prepare few.jsonl --out data/new --tokenizer README.md", "README.md cannot be loaded as"),
    ("simreg-megatron data prepare facts --out data/new --tokenizer data/mine/tokenizer.model", "facts has "
     "nothing to read: give a .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt file, a folder of them, hf:NAME"),
    ("simreg-megatron export-hf --load out/run --save model", "out/run/checkpoints/iter_0000002 is no whole torch_dist "
     "checkpoint: it has no .metadata. Give the folder that --save named"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "sentence"), SIZES_AND_WORDS)
def test_sizes_saving_and_words_in_the_place_of_others(command: str, sentence: str, ask: Ask) -> None:
    refused(ask, command, sentence)


PATHS = [
    (
        "data/mine/train.bin",
        "there is no data/mine/train.bin.bin with data/mine/train.bin.idx: give the path of both without the ending",
    ),
    ("data/mine/trian", "there is no data/mine/trian.bin with data/mine/trian.idx: give the path of both"),
    ("0.3 data/mine/train 0.7", "there is no 0.3.bin with 0.3.idx"),
]


@pytest.mark.parametrize(("path", "sentence"), PATHS)
@pytest.mark.parametrize("flag", ["--data", "--data-path"])
def test_prefixes(flag: str, path: str, sentence: str, ask: Ask) -> None:
    refused(ask, f"{SUBMIT} {flag} {path} --tokenizer data/mine/tokenizer.model", sentence)


def test_a_blend_is_launched_as_megatron_reads_it(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(launcher, "_say", said.append)
    mine = "--data 0.3 data/mine/train 0.7 data/mine/valid --tokenizer data/mine/tokenizer.model"
    assert ask(f"llama --dry-run --seq-length 64 --split 9,1,0 {mine}")[0] == 0
    assert "--data-path 0.3 data/mine/train 0.7 data/mine/valid" in said[0]


def test_a_dry_run_previews_without_data(ask: Ask, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(launcher, "_say", said.append)
    assert ask("llama --dry-run --data data/mine/trian --tokenizer data/mine/tokenizer.model")[0] == 0
    assert "--train-iters" in said[0] and "SimReg is off: add --simreg-lambda 1" in said[0]
    refused = "the run itself would be refused on this machine: there is no data/mine/trian"
    assert said[1].startswith(f"# note      {refused}")
    assert ask(f"llama {OWN.replace('train', 'trian')}")[0] == 2, "the run itself"
    said.clear()
    monkeypatch.delenv("SIMREG_CPU")
    assert ask("llama --dry-run --model 350m --simreg-lambda auto --data PREFIX --tokenizer PATH")[0] == 0
    assert "there is no PREFIX.bin" in said[-1], "the word of the pages is a name like any other"


LAMBDAS = [
    ("", "off"),
    ("--simreg-objective none", "measured, not trained on"),
    (
        "--simreg-objective simreg:auto,sigreg:0.05",
        "simreg, lambda 4.33013 (auto), sigreg, lambda 0.05, chunks of 64 tokens",
    ),
    ("--recipe paper-full", "simreg, lambda 4.33013 (auto), whole sequences"),
]


@pytest.mark.parametrize(("words", "sentence"), LAMBDAS)
def test_a_dry_run_says_what_lambda_comes_to(words: str, sentence: str, ask: Ask, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(launcher, "_say", said.append)
    assert ask(f"llama --dry-run {words}")[0] == 0
    assert f"# simreg    {sentence}" in said[0].splitlines()


def test_few_documents_make_no_validation_set(ask: Ask, place: Path) -> None:
    words = "few.jsonl --tokenizer data/mine/tokenizer.model --out data/few --workers 1"
    assert ask(f"simreg-megatron data prepare {words}")[0] == 0
    assert not (place / "data" / "few" / "valid.idx").exists()
    few = "llama --seq-length 64 --data data/few/train --tokenizer data/mine/tokenizer.model"
    refused(ask, f"{few} --valid-data data/few/valid", "there is no data/few/valid.bin with data/few/valid.idx: give")
    refused(ask, f"{few} --seq-length 9000 --valid-data data/mine/valid", "data/few/train.bin has ")
    # Megatron itself would look for a validation document for ever.
    refused(ask, few, "data/few/train has 3 documents, and --split 99,1,0 leaves none of them to validate: give")
    refused(ask, f"{few} --split 90,10,0", "data/few/train has 3 documents, and --split 90,10,0 leaves none")
    refused(ask, f"{few} --split 0,1,1", "data/few/train has 3 documents, and --split 0,1,1 leaves none of them to t")
    assert ask(f"{few} --split 2,1,0 --dry-run")[0] == 0 == ask(f"{few} --split 100,0,0 --dry-run")[0]


VALUES = """
--train-iters 0 | --train-iters takes a positive whole number, not '0'
--eval-interval 0 | --eval-interval takes a positive whole number, not '0'
--save here | --save needs --save-interval N
--output o --auto-resume --persistent-save-interval 5 --non-persistent-save-interval 2 | a run that can resume (--auto
--step-batch-size-schedule 0:4 | --step-batch-size-schedule excludes the preset's --global-batch-size: leave it out, or
--lr-warmup-iters 400 | --lr-warmup-iters 400 leaves none of 400 iterations for the decay
--model 13b | argument --model: invalid choice: '13b' (choose from
--model 7b | --model 7b needs your text
--data data/mine/train | --data needs --tokenizer PATH
--valid-data data/mine/valid | --valid-data goes with --data PREFIX
--data data/mine/train --tokenizer none.model | none.model cannot be loaded as a tokenizer
--data data/mine/train --data-path x --tokenizer t | --data and --data-path both name the training text
--simreg-lambda | argument --simreg-lambda: expected one argument
--simreg-lambda -1 | SimReg lambda must be a finite number of 0 or more, or auto, not -1
--simreg-lambda 1 --simreg-objective foo | unknown SimReg objective 'foo': choose from simreg,
--recipe baseline --simreg-lambda 10 | --recipe baseline decides --simreg-lambda: leave one of them out
--simreg-objective simreg:1,simreg:2 | SimReg objective 'simreg:1,simreg:2' must be one name, or several different ones
--adagc --adagc-beta 2 | AdaGC's beta must be at least 0 and below 1, not 2.0
--adagc --adagc-warmup-iters 0 --adagc-lambda-abs 2 | --adagc-lambda-abs and --adagc-variant raw have no effect
--ffn big | --ffn takes literal, aligned or a positive number, not 'big'
--ffn 100 --ffn-hidden-size 200 | --ffn and --ffn-hidden-size name the same size
--auto-resume | a run that can resume (--auto-resume, and every submitted one) needs --output DIR
--load none | --load none: there is no complete checkpoint: give the folder that --save named
--no-load-optim | --no-load-optim needs --load FOLDER and a new --output
"""
SIMREG_FLAGS = """
--simreg-temperature 0 | the SimReg temperature must be a number from 0.0001 to 10000, not 0.0
--simreg-layers 0 | SimReg layers must be final, or layer numbers from 1 such as 12,24,final; not '0'
--simreg-chunk-size 1 | SimReg chunk size must be 0, or 2 or more, not 1
--simreg-warmup-iters -5 | SimReg warmup iters must be 0, or 2 or more, not -5
--simreg-lambda-schedule quadratic | the SimReg lambda schedule must be constant, or linear or cosine
--simreg-every 0 | SimReg every must be 1 or more, not 0
--simreg-every 2 --simreg-similarity learnable | SimReg every 2 steps leaves scalars that it trains without a gradient
--simreg-off-after 2 | SimReg is off after a share of the training above 0 and below 1, not 2
--simreg-impl cuda | unknown SimReg impl 'cuda': choose from auto, reference, tiled, triton
--simreg-log-interval 0 | SimReg log interval must be 1 or more, not 0
--simreg-document-mask=yes | argument --simreg-document-mask: ignored explicit argument 'yes'
"""
COMMANDS = """
submit | error: name what to run: launch/pretrain_llama.sh, pretrain_mixtral.sh or pretrain_hybrid.sh
submit --cluster none.env launch/pretrain_llama.sh | error: none.env cannot be read (No such file or directory): give
submit --cluster data launch/pretrain_llama.sh | error: data cannot be read (Is a directory): give a file of settings
submit --cluster cpu.env launch/pretrain_gpt.sh | error: name what to run: launch/pretrain_llama.sh
submit --cluster cpu.env launch/pretrain_llama.sh --save o --save-interval 5 --save-retain-interval 5 | error: --keep N
submit --cluster cpu.env launch/pretrain_llama.sh --model 7b | error: how many nodes? give --nodes N before the script
submit --cluster cpu.env --nodes 0 launch/pretrain_llama.sh | error: --nodes, --slices and --keep must be at least 1
submit --cluster cpu.env --time 10:59 launch/pretrain_llama.sh --save-interval 5 --output o | error: --reserve 10 must
submit --cluster cpu.env --time 1-0 --reserve 1440 launch/pretrain_llama.sh --save-interval 5 --output o | error: --res
submit --cluster cpu.env --reserve nan launch/pretrain_llama.sh --save-interval 5 --output o | error: --reserve nan must
simreg-megatron prepare | invalid choice: 'prepare'
simreg-megatron data prepare few.jsonl --out n --tokenizer TOK --tokens 20X | --tokens: invalid count value: '20X'
simreg-megatron data prepare few.jsonl --out n --tokenizer TOK --tokens inf | --tokens: invalid count value: 'inf'
simreg-megatron data prepare few.jsonl --out n --train-tokenizer 32000 | error: no tokenizer of 32000 pieces can be
simreg-megatron data prepare few.jsonl --tokenizer TOK | the following arguments are required: --out
simreg-megatron data prepare none.jsonl --out n --tokenizer TOK | error: none.jsonl has nothing to read: give a .jsonl
simreg-megatron data prepare few.jsonl --out n --tokenizer TOK --valid few.jsonl --valid-share 0.1 | not allowed with
simreg-megatron data prepare broken.parquet --out n3 --tokenizer TOK | error: broken.parquet cannot be read: Arrow
simreg-megatron evaluate --model a=. --output scores --tasks arc_eazy | error: lm-evaluation-harness has no task
simreg-megatron export-hf --load data --ckpt-step -5 --save model | error: data has no checkpoint '-5': give --ckpt-step
simreg-megatron export-hf --load data/mine --save model | error: data/mine is no whole torch_dist checkpoint
simreg-megatron evaluate --model a=. --output scores --include none | error: --include none is no folder
simreg-megatron evaluate --model a=. --output scores --limit 0 | --limit: invalid count value: '0'
simreg-megatron import-hf --model meta/Llama --save start | error: meta/Llama lacks config.json or model*.safetensors
simreg-megatron evaluate --model none --output scores | error: each --model must be NAME=FOLDER, a folder
simreg-megatron doctor --script none.py | cannot read none.py as Python
"""


def rows(table: str) -> list[tuple[str, ...]]:
    return [tuple(part.strip() for part in line.split(" | ")) for line in table.strip().splitlines()]


@pytest.mark.parametrize(("words", "sentence"), rows(VALUES))
def test_values_and_pairs_of_flags(words: str, sentence: str, ask: Ask) -> None:
    refused(ask, f"llama {words}", sentence)


@pytest.mark.parametrize(("words", "sentence"), rows(SIMREG_FLAGS))
def test_values_of_simreg(words: str, sentence: str, ask: Ask) -> None:
    refused(ask, f"llama --simreg-lambda 1 {words}", sentence)


@pytest.mark.parametrize(("command", "sentence"), rows(COMMANDS))
def test_commands(command: str, sentence: str, ask: Ask, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong use of a command's options is printed after its usage, in a frame."""
    (place / "broken.parquet").write_bytes(b"PAR1abc")
    monkeypatch.setenv("COLUMNS", "200")
    status, line = ask(command.replace("TOK", "data/mine/tokenizer.model"))
    assert status == 2 and _plain(sentence) in _plain(line), line


def _plain(line: str) -> str:
    """Releases of Python differ in quotes and capitals."""
    return line.translate({ord("'"): None, ord(":"): None}).lower()


TOGETHER = """
--bf16 --fp16 | Megatron refuses these flags together: assert not args.bf16
--context-parallel-size 2 --seq-length 255 | Megatron refuses these flags together: seq-length should be a multiple of
--pipeline-model-parallel-size 2 --num-layers 3 | Megatron refuses these flags together: Number of layers should be
--checkpoint-activations | Megatron refuses these flags together: --checkpoint-activations is no longer valid, use --rec
--expert-model-parallel-size 2 | Megatron refuses these flags together: num_experts must be non None
--expert-model-parallel-size 2 --num-experts 3 | Megatron refuses these flags together: Number of experts should be a
--help-me | Megatron has no flag --help-me: did you mean --help?
--fim-data | --fim-data is read by Megatron-LM's own pretrain_gpt.py alone: start that, or set MEGATRON_PATH
--sft --pipeline-model-parallel-size 2 --num-layers 4 --micro-batch-size 2 | --sft packs a micro-batch into one row
--simreg-lambda 1 --simreg-log-interval 15 | --simreg-log-interval 15 must be a multiple of --log-interval 10
--simreg-lambda 1 --simreg-objective mic --simreg-objective-options prefixes=48/500 | SimReg objective mic cannot take
"""


@pytest.mark.megatron
def test_what_megatron_itself_would_refuse(tmp_path: Path) -> None:
    """Its own parser and assertions, and ours that read its arguments; in one process: importing it takes seconds."""
    script = """
import os, sys
from launch import launcher
for words in sys.stdin.read().splitlines():
    ranks = "2" if "parallel-size 2" in words else "1"
    tree, _, flags = words.rpartition(": ")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MEGATRON_PATH=tree)
    try:
        launcher._launch("llama", [*flags.split(), "--dry-run"])
        print("=", words, "was not refused")
    except launcher.LaunchError as error:
        print("=", error)
"""
    of_the_model = "--num-layers 3 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"
    mismatch = "Megatron refuses these flags together: Mismatch: 0 middle layers remaining"
    found = [*rows(TOGETHER), (of_the_model, mismatch)]
    (tmp_path / "pretrain_gpt.py").write_text("")
    right = ["--simreg-lambda 1", f"{tmp_path}: --spec local"]
    asked = "\n".join([*(words for words, _ in found), *right])
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "SIMREG_CPU": "1"}
    done = jobs.run([sys.executable, "-c", script], input=asked, cwd=tmp_path, env=environment)
    answers = [line[2:] for line in done.stdout.splitlines() if line.startswith("= ")]
    assert len(answers) == len(found) + len(right), done.stderr
    for answer, (_, said) in zip(answers, found, strict=False):
        assert answer.startswith(said)
    assert answers[len(found) :] == [f"{words} was not refused" for words in right]
