# SPDX-License-Identifier: Apache-2.0
"""With a Transformer Engine that can be imported: what is logged, what is installed, and runs that do without it."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import jobs
from tests.megatron.runs import ROOT

# Wide initial weights, so that the logits that are compared differ from token to token.
TINY = "--simreg-lambda 1 --train-iters 2 --eval-iters 0 --log-interval 1 --init-method-std 0.15"


def run(*command: object, **env: str) -> str:
    done = jobs.run([str(word) for word in command], cwd=ROOT, env={**os.environ, **env}, merged=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def python(code: str) -> str:
    return run(sys.executable, "-c", code)


def test_megatron_finds_it_and_the_plugin_still_installs() -> None:
    """Nothing of SimReg imports it; Megatron does, and its class for it is a real one after install() too."""
    said = python(
        "import sys, simreg_megatron; assert 'transformer_engine' not in sys.modules\n"
        "simreg_megatron.install(config=simreg_megatron.SimRegConfig(lambda_=1))\n"
        "from megatron.core.extensions import transformer_engine as extensions\n"
        "from megatron.core.models.gpt import GPTModel\n"
        "import transformer_engine.pytorch as te\n"
        "assert extensions.HAVE_TE and issubclass(extensions.TELinear, te.Linear)\n"
        "print(hasattr(GPTModel._postprocess, '__wrapped__'))\n"
        "simreg_megatron.uninstall(); print(hasattr(GPTModel._postprocess, '__wrapped__'))"
    )
    assert said.split()[-2:] == ["True", "False"]


def test_doctor_reports_it() -> None:
    said = run(sys.executable, "-m", "simreg_megatron.cli", "doctor", COLUMNS="200")
    assert re.search(r"transformer-engine\W+2\.\d+", said), said
    assert "cannot be imported" not in said and "missing" not in said and "SimReg can be installed" in said
    assert "Device: no GPU" in said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny LLaMA of the launch script, which has chosen the CPU; its output folder."""
    out = tmp_path_factory.mktemp("run") / "out"
    said = run("bash", "launch/pretrain_llama.sh", *TINY.split(), "--simreg-cpu", "--save-interval", 2, "--output", out)
    (out / "said").write_text(said)
    return out


def test_a_run_on_the_cpu_does_without_it(trained: Path) -> None:
    said = (trained / "said").read_text()
    assert len(re.findall(r"lm loss: [\d.E+]+", said)) == 2 and said.count("simreg loss: ") == 2, said[-3000:]


def test_its_checkpoint_is_exported(trained: Path, tmp_path: Path) -> None:
    words = ("export-hf", "--load", trained / "checkpoints", "--save", tmp_path / "model")
    said = " ".join(run(sys.executable, "-m", "simreg_megatron.cli", *words, COLUMNS="200").split())
    assert "exported from" in said, said
