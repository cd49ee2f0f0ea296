# SPDX-License-Identifier: Apache-2.0
"""The CPU backend is on only when asked for, before Megatron, where no GPU is; its process ends well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.planned import python_path
from simreg_megatron import __main__ as entry
from simreg_megatron.cpu import backend as cpu_backend
from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return jobs.run([sys.executable, "-c", code, *arguments], cwd=ROOT, env={**os.environ, "SIMREG_CPU": "", **env})


ASKED = [
    ([], None, None),
    ([], "0", None),
    ([], "1", "on"),
    ([], "force", "force"),
    (["--simreg-cpu"], None, "on"),
    (["--simreg-cpu=force"], "1", "force"),
]


@pytest.mark.parametrize(("argv", "variable", "mode"), ASKED)
def test_the_flag_and_the_variable_ask_for_it(argv: list[str], variable, mode: str | None, monkeypatch) -> None:
    monkeypatch.delenv("SIMREG_CPU", raising=False)
    if variable is not None:
        monkeypatch.setenv("SIMREG_CPU", variable)
    assert cpu_backend.requested(argv) == mode


def test_refused_after_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(cpu_backend.CpuBackendError, match="must come before Megatron is imported"):
        cpu_backend.activate()
    assert not cpu_backend.is_active()


def test_refused_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in [name for name in sys.modules if name.startswith("megatron.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H800")
    with pytest.raises(cpu_backend.CpuBackendError, match=r"a GPU is here .NVIDIA H800.*=force"):
        cpu_backend.activate()
    with pytest.raises(cpu_backend.CpuBackendError, match="no value or force"):
        cpu_backend.activate("maybe")
    assert not cpu_backend.is_active()


IN_MEGATRON = """
import os, sys, torch
from simreg_megatron.cpu import backend
backend.activate()
from simreg_megatron.cpu import adaptations
from megatron.core import parallel_state as groups
from megatron.core.models.gpt import gpt_model
from megatron.core.tensor_parallel import random
from megatron.core.transformer.torch_norm import WrappedTorchNorm

assert torch.zeros(2, device="cuda").device.type == "cpu" and torch.cuda.is_available() and backend.is_active()
assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
with torch.device("meta"):
    assert torch.empty(2).device.type == "meta", "torch notes its own functions, not their stand-ins"
here = torch.cuda.current_device()
assert torch.ones(1, device=here).to(here).device.type == "cpu" and f"cuda:{here}" == "cuda:0"

groups.model_parallel_is_initialized = lambda: True
def drawn(rank, size):
    groups.get_tensor_model_parallel_world_size = lambda: size
    groups.get_expert_model_parallel_world_size = lambda: 1
    torch.manual_seed(3)
    random.model_parallel_cuda_manual_seed(3, False, False, tp_rank=rank, ep_rank=0, etp_rank=0)
    with random.get_cuda_rng_tracker().fork():
        weights = torch.randn(4)
    return weights, torch.randn(4)
(one, after_one), (other, after_other), (alone, _) = drawn(0, 2), drawn(1, 2), drawn(0, 1)
assert not torch.equal(one, other) and torch.equal(after_one, after_other)
torch.manual_seed(3)
assert torch.equal(alone, torch.randn(4))

adaptations._build_for_this_python(lambda: print("first on the PATH:", os.environ["PATH"].partition(":")[0]))
print("restored:", os.environ["PATH"])
adaptations._build_for_this_python(lambda: sys.exit(1))
"""


@pytest.mark.megatron
def test_megatron_on_the_stand_ins(tmp_path: Path) -> None:
    """Tensors of CUDA lie on the CPU, also with a broken Transformer Engine; ranks draw weights of their own."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('undefined symbol: cublasLt')")
    done = python(IN_MEGATRON, PYTHONPATH=python_path(tmp_path, ROOT), PATH="/usr/bin:/bin")
    assert done.returncode == 1 and done.stdout.count("Megatron runs on the CPU") == 1, done.stderr
    assert f"first on the PATH: {Path(sys.executable).parent}" in done.stdout
    assert "restored: /usr/bin:/bin\n" in done.stdout, done.stderr
    assert "error: Megatron could not build its dataset helpers" in done.stderr


REFUSED = [
    (["SCRIPT", "--simreg-lambda", "10"], "error: no GPU is here, and Megatron needs one: add --simreg-cpu"),
    (["nowhere.py"], "error: there is no script nowhere.py"),
    (["--plain"], "error: --plain needs a script"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_starts_that_are_refused(words: list[str], sentence: str, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "script.py").write_text("raise AssertionError('the script must not start')")
    monkeypatch.delenv("SIMREG_CPU", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["-m", *(word.replace("SCRIPT", str(tmp_path / "script.py")) for word in words)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(sentence)


# The main thread never gives Python's lock away between the collective and its end, so that gloo's thread, the last
# holder of the tensor, is sure to ask for it in the one moment in which that is fatal.
_SCRIPT = """
import atexit, sys, time
import torch
import torch.distributed as dist
from simreg_megatron.cpu import backend

atexit.register(backend.settle)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
held = dist.new_group([0])  # as Megatron's globals hold its groups to the end
sys.setswitchinterval(1000)


def collective():
    dist.all_reduce(torch.ones(100_000), group=held, async_op=True)


for _ in range(16):
    collective()
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
print("all work done", flush=True)
"""


def test_a_run_that_did_its_work_ends_well(tmp_path: Path) -> None:
    done = jobs.run([sys.executable, "-c", _SCRIPT, str(tmp_path / "store")], cwd=ROOT)
    assert done.returncode == 0 and "all work done" in done.stdout, done.stderr
