# SPDX-License-Identifier: Apache-2.0
"""`torchrun launch/pretrain_llama.sh --simreg-lambda 10`, word for word, and the layouts a newcomer tries next."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils import tensorboard
from torch.utils.tensorboard import SummaryWriter

from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from simreg_megatron.tools.curves import VALIDATION_LOSS, read_run
from tests.helpers import jobs
from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.runs import Finished

LLAMA, MIXTRAL = "launch/pretrain_llama.sh", "launch/pretrain_mixtral.sh"
SHORT = ("--train-iters", "2", "--log-interval", "1", "--eval-iters", "1")


STARTS = {
    "llama-bf16": (LLAMA, 1, ("--bf16", "--ffn", "171")),  # odd, as the sizes of the paper
    "llama-dp2": (LLAMA, 2, ()),
    "llama-tp2-sp": (LLAMA, 2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "llama-pp2": (LLAMA, 2, ("--pipeline-model-parallel-size", "2")),
    "mixtral-ep2": (MIXTRAL, 2, ("--expert-model-parallel-size", "2")),
}


def own(text: BuiltinCorpus, output: Path) -> list[str]:
    return ["--data", str(text.train_prefix), "--tokenizer", str(text.tokenizer_model), "--output", str(output)]


def command_of(start: str, text: BuiltinCorpus, output: Path) -> tuple[list[str], int]:
    script, processes, flags = STARTS[start]
    return [script, "--simreg-lambda", "10", *SHORT, *own(text, output), *flags], processes


def check_that_it_trained(done: Finished) -> None:
    assert done.status == 0, done.output[-4000:]
    logged = [float(value) for value in re.findall(r"simreg loss: (\S+) \|", done.output)]
    assert len(logged) == 2 and all(value > 0 for value in logged), "SimReg must be on, and in the log"
    assert "chunks of 64 tokens" in done.output


@pytest.mark.parametrize("start", quick(STARTS, lambda start: start == "llama-bf16"))
def test_torchrun_starts_the_script(start: str, text: BuiltinCorpus, tmp_path: Path) -> None:
    command, processes = command_of(start, text, tmp_path)
    done = runs.torchrun(command, processes=processes)
    check_that_it_trained(done)
    assert "Megatron runs on the CPU" in done.output
    assert f"\n> Trains on cpu in {'bf16' if '--bf16' in command else 'fp32'}\n" in done.output


@pytest.mark.parametrize("start", quick(STARTS, lambda start: start == "mixtral-ep2"))
def test_the_script_trains_in_every_layout(start: str, text: BuiltinCorpus, tmp_path: Path) -> None:
    command, processes = command_of(start, text, tmp_path)
    check_that_it_trained(runs.launched(command, tmp_path, processes=processes))


class LateWriter(SummaryWriter):
    """A writer whose thread has written nothing until it is flushed."""

    def add_scalar(self, *scalar: Any, **options: Any) -> None:
        self.__dict__.setdefault("queue", []).append((scalar, options))

    def flush(self) -> None:
        for scalar, options in self.__dict__.pop("queue", []):
            super().add_scalar(*scalar, **options)
        super().flush()


def _end_at_once(words: list[str]) -> None:
    tensorboard.SummaryWriter = LateWriter
    runs._launch(words)
    os._exit(0)


def test_the_last_validation_is_written_when_training_ends(text: BuiltinCorpus, tmp_path: Path) -> None:
    command, _ = command_of("llama-bf16", text, tmp_path)
    done = runs.forked(_end_at_once, command, folder=tmp_path)
    assert done.status == 0, done.output[-4000:]
    logged = re.search(r" validation loss at iteration 2 on validation set \| lm loss value: (\S+) \|", done.output)
    validation = read_run(tmp_path / "tensorboard").scalars[VALIDATION_LOSS]
    assert logged and validation.steps[-1] == 2
    assert validation.values[-1] == pytest.approx(float(logged[1]), rel=1e-6)


@pytest.mark.parametrize("recipe", quick(["paper", "creg"], lambda recipe: recipe == "paper"))
def test_a_recipe_runs(recipe: str, text, tmp_path: Path) -> None:
    done = runs.launched([LLAMA, "--recipe", recipe, *SHORT, *own(text, tmp_path)], tmp_path)
    assert done.status == 0, done.output[-4000:]
    assert "AdaGC (clipped)" in done.output and "adagc clipped share" in done.output
    assert f"{recipe.replace('paper', 'simreg')} loss: " in done.output


@pytest.mark.slow
def test_two_nodes_meet(text: BuiltinCorpus, tmp_path: Path) -> None:
    first, second = runs.two_nodes([LLAMA, "--simreg-lambda", "10", *SHORT, *own(text, tmp_path)])
    assert first.status == 0 == second.status, first.output[-2000:] + second.output[-2000:]
    assert "data-parallel size: 2" in first.output
    assert "simreg loss" in first.output + second.output


def test_the_same_command_goes_on_and_ends(text, tmp_path: Path) -> None:
    """--auto-resume: stopped half-way, started again past a torn checkpoint, and then done."""
    four = ["--train-iters", "4", "--save-interval", "1"]
    command = [LLAMA, "--simreg-lambda", "10", *SHORT, *own(text, tmp_path), *four]
    start = runs.launched([*command, "--auto-resume", "--exit-interval", "2"], tmp_path)
    assert start.status == 0 and "exiting program at iteration 2" in start.output, start.output[-3000:]
    refused = runs.launched([*command, "--save", str(tmp_path / "checkpoints")], tmp_path)
    assert refused.status != 0 and "resume it with --auto-resume" in refused.output
    torn = tmp_path / "checkpoints" / "iter_0000003"
    torn.mkdir()
    again = runs.launched([*command, "--auto-resume"], tmp_path)
    assert again.status == 0 and f"{torn} was never finished: deleted" in again.output, again.output[-3000:]
    assert "resuming from iteration 2" in again.output
    assert re.findall(r"iteration +(\d+)/ +4 \|", again.output) == ["3", "4"]
    done = runs.launched([*command, "--auto-resume"], tmp_path)
    assert done.status == 0 and "4 iterations are done, so there is nothing to do" in done.output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if jobs.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]).returncode:
        pytest.skip("only root may mount a small disk here")
    yield folder
    jobs.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_after_a_full_disk_room_is_enough_to_go_on(text, tmp_path: Path, small_disk: Path) -> None:
    command = [LLAMA, "--simreg-lambda", "1", *SHORT, *own(text, small_disk), "--save-interval", "1", "--auto-resume"]
    done = runs.torchrun(command)
    assert done.status != 0
    jobs.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    again = runs.torchrun(command)
    assert again.status == 0, again.output[-4000:]
    assert "was never finished: deleted" in again.output and "iteration        2/       2" in again.output
