# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.replay REF`: does the code here compute the same bits as at a commit? For changes that move code.

Every objective, option, form and type on one small micro-batch in one process: gradients of the hidden states, of the
loss and of trained scalars, and apart from these the values of the log, as they are in memory. With `--kernels` also
the machine code of every Triton kernel for sm_90, without its line numbers. Exit status 1, and the names, where
anything differs.

The commit is put into a worktree of its own and asked for the same cases by this very file, so it must offer what is
used here: `SimRegConfig`, `Regularizer.terms` and `add_to`, and `learnable.add_to`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
BATCH, LENGTH, WIDTH, VOCABULARY, ITERATION = 2, 70, 24, 40, 3
_HERE = "here"
_NOT_COMPUTED = "not computed: "


def settings() -> Iterator[dict[str, Any]]:
    """Yield the settings of every case: each choice of each option alone, on chunks that leave a ragged end."""
    from simreg_megatron import objectives
    from simreg_megatron.config import simreg as config

    names = "similarity", "group_reduce", "scope", "self_positive", "chunk_weight"
    choices = {name: config.CHOICES[name] for name in names}
    for objective in map(objectives.find, objectives.BUILT_IN):
        weight = {"lambda_": 2.0} if objective.trains else {}
        base = {"objective": objective.name, "temperature": 0.1, "chunk_size": 24, **weight}
        if objective.temperature is None:
            del base["temperature"]
        yield base
        yield {**base, "chunk_size": 0}
        for name, known in objective.options.items():
            values = known[1:] if isinstance(known, tuple) else ("8/16",) if isinstance(known, str) else (1,)
            yield from ({**base, "objective_options": f"{name}={value}"} for value in values)
    base = {"lambda_": 2.0, "chunk_size": 24}
    for name, values in choices.items():
        yield from ({**base, name: value} for value in values)
    yield from ({**base, "impl": impl} for impl in ("reference", "tiled"))
    head = "pairs=hidden-head,adapter=yes,self_positive=never"
    yield {"lambda_": 2.0, "objective": "sigmoid", "chunk_size": 24, "objective_options": head}
    yield {"objective": "simreg:2,sigreg:0.1,creg:1", "chunk_size": 24}
    yield {**base, "warmup_iters": 8}


def results(cases: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return digests of the training and of the log, or the sentence of an error, by case."""
    found = {}
    for given in cases:
        for dtype in ("float32", "bfloat16"):
            name = json.dumps({**given, "dtype": dtype})
            try:
                found[name], found[f"{name}, log"] = _digests(given, dtype)
            except (ValueError, AssertionError) as error:  # a refusal, or Megatron's of what needs other ranks
                found[name] = f"{_NOT_COMPUTED}{error}"
    return found


def _digests(given: dict[str, Any], dtype: str) -> tuple[str, str]:
    import torch

    from simreg_megatron import SimRegConfig
    from simreg_megatron.parallel import learnable
    from simreg_megatron.plugin.compat import ALONE
    from simreg_megatron.plugin.term import Regularizer

    torch.manual_seed(0)
    try:
        settings = SimRegConfig(**given)
    except ValueError as error:
        if "chunk size" not in str(error):
            raise
        settings = SimRegConfig(**{name: value for name, value in given.items() if name != "chunk_size"})
    model = _model()
    learnable.add_to(model, learnable.wanted(settings))
    hidden_states = torch.randn(LENGTH, BATCH, WIDTH).to(getattr(torch, dtype)).requires_grad_()
    labels, mask = torch.randint(0, VOCABULARY, (BATCH, LENGTH)), (torch.rand(BATCH, LENGTH) < 0.9).float()
    loss = torch.rand(BATCH, LENGTH, requires_grad=True)
    regularizer = Regularizer(settings)
    with mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        regularizer.strength.set_iteration(ITERATION, 100)
    regularizer.metrics.wants_geometry = True
    result = regularizer.add_to(loss, regularizer.terms(model, hidden_states, labels, mask))
    (result * mask).sum().backward()
    parts = [result, loss.grad, hidden_states.grad, *(parameter.grad for parameter in model.parameters())]
    log = [torch.as_tensor(value) for _, value in sorted(regularizer.metrics.reduce(ALONE).items())]
    return _digest(parts), _digest(log)


def _digest(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"-" if part is None else part.detach().double().numpy().tobytes())
    return digest.hexdigest()


def _model() -> Any:
    """Make as much of a GPTModel as objectives need."""
    from types import SimpleNamespace

    import torch

    from simreg_megatron.plugin.compat import ALONE

    model = torch.nn.Module()
    model.output_layer = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.config = SimpleNamespace(sequence_parallel=False, hidden_size=WIDTH)
    model.pg_collection = SimpleNamespace(tp=ALONE, cp=ALONE, dp_cp=ALONE)
    model.share_embeddings_and_output_weights = False
    return model


def kernels() -> dict[str, str]:
    """Return a digest of the code of each kernel, by what it was compiled for."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.helpers.compile_kernels", "90"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line["variant"]: line["code"] for line in map(json.loads, lines) if "code" in line}


def at_commit(ref: str, cases: list[dict[str, Any]], *, with_kernels: bool) -> dict[str, str]:
    """Run this file in a worktree of the commit, and return what it finds."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, ref], cwd=ROOT, check=True)
        try:
            command = [sys.executable, __file__, _HERE, *(["--kernels"] if with_kernels else [])]
            from launch.planned import python_path  # not in that worktree, where this file runs, too

            environment = {**os.environ, "PYTHONPATH": python_path(tree)}
            done = subprocess.run(
                command,
                cwd=tree,
                env=environment,
                input=json.dumps(cases),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    where, found = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert where.startswith(str(tree)), f"{where} is not the package of {ref}"
    return dict(found)


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """List cases that both know and whose bits differ; what one alone knows is no difference of bits."""
    return [name for name in before if name in now and before[name] != now[name]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="the commit to compare with, such as HEAD~1")
    parser.add_argument("--kernels", action="store_true", help="compile the Triton kernels, too")
    options = parser.parse_args()
    import simreg_megatron

    cases = json.load(sys.stdin) if options.ref == _HERE else list(settings())
    own = results(cases) | (kernels() if options.kernels else {})
    if options.ref == _HERE:
        print(json.dumps(simreg_megatron.__file__))
        print(json.dumps(own))
        return 0
    before = at_commit(options.ref, cases, with_kernels=options.kernels)
    wrong = differences(before, own)
    for name in wrong:
        print(f"differs: {name}")
    both = before.keys() & own.keys()
    neither = sum(before[name] == own[name] and own[name].startswith(_NOT_COMPUTED) for name in both)
    same, alone = len(both) - len(wrong) - neither, len(before.keys() ^ own.keys())
    print(
        f"{same} cases have the same bits, {len(wrong)} others; {neither} not computed by either, {alone} new or gone"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
