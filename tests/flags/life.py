# SPDX-License-Identifier: Apache-2.0
"""One combination from its command line to its last step, on forked ranks, and its outcome.

Everything is Megatron's own: its parser, its checks, its model, its loop. Changed are two things: the made-up text has
a few short documents in the place of 100,000 long ones, which would take most of the time; and steps leave notes.
"""

import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.flags.combination import Combination
from tests.helpers import jobs
from tests.megatron import forks
from tests.megatron.runs import PRETRAIN

TIMEOUT = 60.0  # seconds; most take less than one
_PACKAGE = str(PRETRAIN.parent) + os.sep
_AGAIN = ("--train-iters=7", "--override-opt_param-scheduler")  # a resume that has steps left
_FRAMES = 8  # of a traceback that are kept
_TAIL = 500  # characters of a log


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)  # of each step; empty on ranks that do not compute it
    norms: list[float | None] = field(default_factory=list)  # None where the step was skipped
    logged: list[dict[str, float]] = field(default_factory=list)  # SimReg's and AdaGC's values, line by line
    terms: list[bool] = field(default_factory=list)  # of each micro-batch: whether all are finite
    digest: str = ""  # of the parameters that plain Megatron has, too, after the last step
    strength: list[bool] = field(default_factory=list)  # whether the settings let SimReg train in an iteration
    error: str = ""  # its type, or "exit" with its status
    said: str = ""
    place: str = ""  # file:function that raised it
    is_ours: bool = False
    trace: list[str] = field(default_factory=list)


def live(combination: Combination, folder: Path, *, plain: bool = False, timeout: float = TIMEOUT) -> list[Outcome]:
    """Run a combination and return each rank's outcome of the last start; `plain`: without the plugin and our flags."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        out = Path(place)
        flags = combination.flags(out, plain=plain)
        found = _start_once(out / "first", flags, combination.processes, plain, timeout)
        if combination.resumes and not any(outcome.error for outcome in found):
            found = _start_once(out / "again", [*flags, *_AGAIN], combination.processes, plain, timeout)
        return found


def _start_once(out: Path, flags: list[str], processes: int, plain: bool, timeout: float) -> list[Outcome]:
    log = out / "log"
    try:
        status = forks.run_ranks(_rank, out, flags, plain, processes=processes, log=log, timeout=timeout)
    except jobs.HungError as error:
        return [Outcome(error="hung", trace=_where_it_hung(str(error)))]
    found = [Outcome(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(out.glob("rank*.json"))]
    printed = log.read_text(errors="replace")
    if status and not any(outcome.error for outcome in found):
        found.append(Outcome(error=f"status {status}", said=printed[-_TAIL:]))
    for outcome in found:
        if outcome.error.startswith("exit"):
            outcome.said = _printed_error(printed, processes)
    return found


def _printed_error(printed: str, processes: int) -> str:
    """Return the last words of a program that ends itself, after a word about a page of usage; of several, one line."""
    usage = "usage: ... " if re.search("^usage: ", printed, re.MULTILINE) else ""
    error = "".join(printed.rpartition("error: ")[1:]).strip() if "error: " in printed else ""
    return usage * bool(error) + (error if processes == 1 else error.partition("\n")[0])[:_TAIL]


def _where_it_hung(text: str) -> list[str]:
    """The innermost frames of the first rank's first thread, outermost first as in a traceback."""
    frames = [line.strip() for line in text.splitlines() if line.lstrip().startswith('File "')]
    return frames[:_FRAMES][::-1]


def _rank(out: Path, flags: list[str], plain: bool) -> None:
    outcome = Outcome()
    try:
        _watch(outcome, plain)
        _start(flags, plain)
    except BaseException as error:
        _note(outcome, error)
    text = json.dumps(asdict(outcome))
    part = out / f"part{os.environ['RANK']}"
    part.write_text(text, encoding="utf-8")
    part.rename(out / f"rank{os.environ['RANK']}.json")
    if outcome.error:
        raise SystemExit(1)  # others must not wait for this rank


def _start(flags: list[str], plain: bool) -> None:
    from simreg_megatron.__main__ import run
    from simreg_megatron.cpu.backend import connections

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections(flags)
    if any(word.startswith("--save") for word in flags):
        forks.quick_save()
    run([str(PRETRAIN), *flags], plain=plain)


def _watch(outcome: Outcome, plain: bool) -> None:
    """Let Megatron's steps, and SimReg in them, leave notes."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import training

    MockGPTLowLevelDataset.size, MockGPTLowLevelDataset.max_sequence_length = 200, 12
    MockGPTLowLevelDataset.__getitem__ = _document
    training.train_step = _noted_step(training.train_step, outcome)
    if plain:
        return
    from simreg_megatron.plugin import installation, log
    from simreg_megatron.plugin.term import Regularizer, Strength

    console, terms, set_iteration = log.add_to_console, Regularizer.terms, Strength.set_iteration

    def noted_console(means: Any, *args: Any, **kwargs: Any) -> None:
        outcome.logged.append({name: value.double().item() for name, value in means.items()})
        console(means, *args, **kwargs)

    def noted_terms(self: Any, *args: Any) -> Any:
        found = terms(self, *args)
        if found is not None and found.weighted:
            outcome.terms.append(all(bool(torch.isfinite(each).all()) for each, *_ in found.weighted))
        return found

    def noted_iteration(self: Any, *args: Any, **kwargs: Any) -> None:
        set_iteration(self, *args, **kwargs)
        outcome.strength.append(installation.regularizer().trains_now)

    log.add_to_console = noted_console
    Regularizer.terms = noted_terms  # type: ignore[method-assign]
    Strength.set_iteration = noted_iteration  # type: ignore[method-assign]


def _document(text: Any, index: int) -> Any:
    """Random words: Megatron's own text counts upwards, so states with the same next word would all be alike."""
    words = numpy.random.default_rng(index).integers(text.vocab_size, size=text.sequence_lengths[index] - 1)
    return numpy.append(words, text.eod_token).astype(numpy.int64)


def _noted_step(train_step: Any, outcome: Outcome) -> Any:
    @functools.wraps(train_step)
    def noted(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = train_step(forward_step, data_iterator, model, *args, **kwargs)
        loss_dict, skipped, norm = result[0], result[1], result[5]
        if "lm loss" in loss_dict:
            outcome.losses.append(loss_dict["lm loss"].double().item())
        outcome.norms.append(None if skipped or norm is None else float(norm))
        outcome.digest = _digest(model)
        return result

    return noted


def _digest(model: Any) -> str:
    found = hashlib.sha256()
    for part in model:
        for name, parameter in part.named_parameters():
            if "simreg" not in name:
                local = getattr(parameter, "_local_tensor", parameter)
                found.update(local.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _note(outcome: Outcome, error: BaseException) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    outcome.error = f"exit {error.code}" if isinstance(error, SystemExit) else type(error).__name__
    outcome.said = str(error)
    outcome.is_ours = last.filename.startswith(_PACKAGE)
    folder = _PACKAGE if outcome.is_ours else "site-packages" + os.sep
    outcome.place = f"{last.filename.rpartition(folder)[2]}:{last.name}"
    outcome.trace = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-_FRAMES:]]
    sys.stderr.flush()
