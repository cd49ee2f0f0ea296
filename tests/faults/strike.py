# SPDX-License-Identifier: Apache-2.0
"""Faults that strike a rank from inside, at a chosen moment; nothing of it is in the package.

A rank with `VARIABLE` in its environment arms the strike named there. Moments are Megatron's steps and what Python's
audit hooks report of files. A mark in the fault's folder shows that it happened, and keeps it from happening twice.
"""

import ctypes
import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SIMREG_TEST_STRIKE"
FIRED, EVENTS, PASSES = "fired.json", "events.txt", "passes.txt"
SIGNALS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT, "sigstop": signal.SIGSTOP}
FROM_OUTSIDE = ("node", "torchrun")  # the process that follows the run waits for the mark, and does it
_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.link"}
_LOOP = "megatron.training.training"
_FOR_EVER = 1_000_000
NONE = "none"


@dataclass(frozen=True)
class Strike:
    kind: str  # "none" only counts events
    when: str  # "step", "save", "write", "resume"; "clock" is struck from outside
    number: int  # of the step, or of the event, from 1
    delay: float  # seconds from there
    rank: int  # that is struck
    output: str  # the run's folder
    notes: str  # where marks go

    def in_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def install() -> None:
    """Arm what the environment names, in the rank that it names; every rank writes its process id."""
    text, rank = os.environ.get(VARIABLE), os.environ.get("RANK")
    if not text or rank is None or "--multiprocessing-fork" in sys.orig_argv:
        return
    strike = Strike(**json.loads(text))
    (Path(strike.notes) / f"pid.{rank}").write_text(str(os.getpid()))
    if int(rank) == strike.rank and strike.when != "clock":
        Armed(strike).arm()


def retire() -> None:
    """This rank is done, so that nothing may strike it from outside."""
    if text := os.environ.get(VARIABLE):
        (Path(Strike(**json.loads(text)).notes) / f"pid.{os.environ['RANK']}").unlink(missing_ok=True)


class Armed:
    def __init__(self, strike: Strike) -> None:
        self.strike = strike
        self.notes, self.output = Path(strike.notes), strike.output + os.sep
        self.saves = os.path.join(self.output, "checkpoints", "")
        self.step = 0
        self._main = threading.main_thread().ident
        self._inside = threading.local()

    def arm(self) -> None:
        after_import(_LOOP, self._wrap_steps)
        if self.strike.when != "step":
            sys.addaudithook(self._hear)

    def _wrap_steps(self, training: Any) -> None:
        train_step = training.train_step

        @functools.wraps(train_step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step = training.get_args().curr_iteration + 1
            if self.strike.when == "step" and self.step == self.strike.number:
                self.fire(f"step {self.step}")
            return train_step(*args, **kwargs)

        training.train_step = counted

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CHANGES or getattr(self._inside, "busy", False):
            return
        path = os.path.abspath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if not path.startswith(self.output) or path.startswith(str(self.notes)):
            return
        self._inside.busy = True
        try:
            if self._kind_of(event, path, arguments) == self.strike.when:
                self._count(f"{event} {path.removeprefix(self.output)}")
        finally:
            self._inside.busy = False

    def _kind_of(self, event: str, path: str, arguments: tuple[Any, ...]) -> str:
        changes = event != "open" or _writes(arguments[1], arguments[2])
        if path.startswith(self.saves):
            return "save" if changes else "resume"
        return "write" if changes else "read"

    def _count(self, what: str) -> None:
        """Together with the processes that this rank forks to write: they append to one file."""
        with open(self.notes / EVENTS, "a") as file:
            file.write(f"{os.getpid()} {what}\n")
        number = len((self.notes / EVENTS).read_text().splitlines())
        if number == self.strike.number or (self.strike.kind == "slow" and number >= self.strike.number):
            self.fire(what)

    def fire(self, what: str) -> None:
        if self.strike.kind == NONE:
            return
        note = {"time": time.time(), "step": self.step, "what": what, "pid": os.getpid()}
        try:
            with open(self.notes / FIRED, "x") as file:
                json.dump(note, file)
        except FileExistsError:
            if self.strike.kind != "slow":
                return
        if self.strike.delay and self.strike.kind == "exception":
            threading.Timer(self.strike.delay, self._raise_in_main).start()
        elif self.strike.delay and self.strike.kind != "slow":
            threading.Timer(self.strike.delay, act, (self.strike,)).start()
        else:
            act(self.strike)

    def _raise_in_main(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), ctypes.py_object(InjectedError))


class InjectedError(RuntimeError):
    def __init__(self, *args: object) -> None:
        super().__init__(*(args or ("an injected exception",)))


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def act(strike: Strike) -> None:
    if strike.kind in FROM_OUTSIDE:
        return
    if strike.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[strike.kind])
    else:
        _DEEDS[strike.kind](strike)


def _raise(strike: Strike) -> None:
    raise InjectedError()


def _segfault(strike: Strike) -> None:
    ctypes.string_at(0)


def _abort(strike: Strike) -> None:
    os.abort()


def _hold_the_gil(strike: Strike) -> None:
    ctypes.PyDLL(None).sleep(_FOR_EVER)  # unlike CDLL, it does not let go


def _make_read_only(strike: Strike) -> None:
    """The folder of checkpoints is a disk of its own then."""
    command = ["mount", "-o", "remount,ro", os.path.join(strike.output, "checkpoints")]
    for _ in range(100):  # busy while a file is open for writing
        if subprocess.run(command, capture_output=True).returncode == 0:
            return
        time.sleep(0.05)


def _wait(strike: Strike) -> None:
    time.sleep(strike.delay)


def _doubt_the_loss(strike: Strike) -> None:
    """Megatron's own injector: it rejects the loss of this step once, so that the step is computed a second time."""
    from megatron.core.rerun_state_machine import RerunDiagnostic, get_rerun_state_machine

    from simreg_megatron.plugin import installation

    injector = get_rerun_state_machine().error_injector
    injector.error_injection_rate, injector.should_inject_errors = 1, True
    injector.error_injection_type = RerunDiagnostic.TRANSIENT_ERROR
    metrics = type(installation.regularizer().metrics)
    observe = metrics.observe

    def recorded(own: Any, terms: Any, *arguments: Any) -> Any:
        with open(Path(strike.notes) / PASSES, "a") as file:
            file.write(repr([[value.hex() for value in term.double().flatten().tolist()] for term in terms]) + "\n")
        return observe(own, terms, *arguments)

    metrics.observe = recorded  # type: ignore[method-assign]


_DEEDS: dict[str, Callable[[Strike], None]] = {
    "exception": _raise,
    "sigsegv": _segfault,
    "abort": _abort,
    "gil": _hold_the_gil,
    "read-only": _make_read_only,
    "slow": _wait,
    "rerun": _doubt_the_loss,
}


def after_import(name: str, act_on: Callable[[Any], None]) -> None:
    """Call `act_on` with a module: now if it is there, else as soon as it has been imported."""
    if name in sys.modules:
        act_on(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, act_on))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act_on: Callable[[Any], None]) -> None:
        self.name, self.act_on = name, act_on

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            self.act_on(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
