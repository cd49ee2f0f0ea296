# SPDX-License-Identifier: Apache-2.0
"""The CPU backend is on only when asked for, before Megatron, where no GPU is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.installed import python_path
from tests.helpers import jobs
from tests.helpers.processes import run_processes

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return jobs.run(
        [sys.executable, *(("-c", code) if code else ()), *arguments],
        cwd=ROOT,
        env={**os.environ, "SIMREG_CPU": "", **env},
    )


@pytest.mark.parametrize(
    ("argv", "variable", "mode"),
    [
        ([], None, None),
        ([], "0", None),
        ([], "1", "on"),
        ([], "force", "force"),
        (["--simreg-cpu"], None, "on"),
        (["--simreg-cpu=force"], "1", "force"),
    ],
)
def test_who_asks(argv: list[str], variable: str | None, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.megatron
def test_megatron_meets_the_stand_ins() -> None:
    done = python(
        "from simreg_megatron.cpu import backend as cpu_backend; cpu_backend.activate(); import torch; "
        "from megatron.core.transformer.torch_norm import WrappedTorchNorm; "
        "assert torch.zeros(2, device='cuda').device.type == 'cpu'; "
        "assert torch.ones(1).cuda().type() == 'torch.cuda.FloatTensor'; "
        "here = torch.cuda.current_device(); "
        "assert torch.ones(1, device=here).to(here).device.type == 'cpu' and f'cuda:{here}' == 'cuda:0'; "
        "assert torch.cuda.is_available() and cpu_backend.is_active()"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Megatron runs on the CPU") == 1


@pytest.mark.megatron
def test_ranks_that_cut_weights_draw_their_own_numbers() -> None:
    """Heads that begin as copies of each other stay that; a run on one rank draws what it always has."""
    done = python(
        "from simreg_megatron.cpu import backend as cpu_backend; cpu_backend.activate(); import torch; "
        "from megatron.core import parallel_state as groups; from megatron.core.tensor_parallel import random; "
        "groups.model_parallel_is_initialized = lambda: True\n"
        "def drawn(rank, size):\n"
        "    groups.get_tensor_model_parallel_world_size = lambda: size\n"
        "    groups.get_expert_model_parallel_world_size = lambda: 1\n"
        "    torch.manual_seed(3)\n"
        "    random.model_parallel_cuda_manual_seed(3, False, False, tp_rank=rank, ep_rank=0, etp_rank=0)\n"
        "    with random.get_cuda_rng_tracker().fork(): weights = torch.randn(4)\n"
        "    return weights, torch.randn(4)\n"
        "(one, after_one), (other, after_other), (alone, _) = drawn(0, 2), drawn(1, 2), drawn(0, 1)\n"
        "assert not torch.equal(one, other) and torch.equal(after_one, after_other)\n"
        "torch.manual_seed(3); assert torch.equal(alone, torch.randn(4))"
    )
    assert done.returncode == 0, done.stderr


def check_fsdp(rank: int) -> None:
    """Two ranks shard a layer by a mesh that Megatron would ask for, and compute what the whole layer does."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]  # an earlier test of this worker may have imported it
    cpu_backend.activate("force")
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole, sharded = (torch.nn.Linear(6, 4, dtype=torch.float64) for _ in range(2))
    sharded.load_state_dict(whole.state_dict())
    inputs = torch.randn(2, 5, 6, dtype=torch.float64)
    fully_shard(sharded, mesh=DeviceMesh.from_group(torch.distributed.group.WORLD, "cuda"))
    output = sharded(inputs[rank])
    output.square().sum().backward()
    whole(inputs).square().sum().div(2).backward()  # over the ranks, FSDP takes the mean
    torch.testing.assert_close(output, whole(inputs[rank]))
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), whole.weight.grad)
    assert sharded.weight.to_local().numel() == whole.weight.numel() // 2


@pytest.mark.megatron
@pytest.mark.distributed
def test_fsdp_shards_on_the_cpu(tmp_path: Path) -> None:
    run_processes(check_fsdp, 2, tmp_path)


def test_megatron_alone_does_not_meet_the_flag_of_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, torch; print(sys.argv[1:], torch.zeros(1, device='cuda').device)")
    words = (str(tmp_path / "script.py"), "--simreg-cpu=force", "--lr", "1")
    done = python("", "-m", "simreg_megatron", "--plain", *words)
    assert done.returncode == 0 and "'--distributed-backend', 'gloo'" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("'--lr', '1'] cpu") and "simreg-cpu" not in done.stdout


def test_a_script_finds_its_own_folder_first_and_not_the_working_directory(tmp_path: Path) -> None:
    """As `python SCRIPT` does: from a clone of ours, `tools` or `tests` would hide packages of these names."""
    for folder in ("scripts", "elsewhere"):
        (tmp_path / folder).mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.write_text("import os, sys; print([os.path.abspath(folder) for folder in sys.path])")
    command = [sys.executable, "-m", "simreg_megatron", "--plain", str(script), "--simreg-cpu=force"]
    done = jobs.run(command, cwd=tmp_path / "elsewhere", env={**os.environ, "PYTHONPATH": python_path(ROOT)})
    folders = ast.literal_eval(done.stdout.splitlines()[-1])
    assert folders[0] == str(script.parent) and str(tmp_path / "elsewhere") not in folders, done.stderr


def test_without_a_gpu_and_without_asking(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('the script must not start')")
    done = python("", "-m", "simreg_megatron", str(script), "--simreg-lambda", "10")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("error: no GPU is here, and Megatron needs one: add --simreg-cpu")
    )


def test_a_missing_script_is_named() -> None:
    done = python("", "-m", "simreg_megatron", "nowhere.py")
    assert done.returncode == 2 and "there is no script nowhere.py" in done.stderr
    assert "error: --plain needs a script" in python("", "-m", "simreg_megatron", "--plain").stderr


@pytest.mark.megatron
def test_transformer_engine_stays_out_of_it(tmp_path: Path) -> None:
    """Megatron takes its norm wherever it can be imported, and ends where importing it ends otherwise."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('undefined symbol: cublasLt')")
    imported = "from megatron.core.models.gpt import gpt_model; print('whole')"
    path = python_path(tmp_path, ROOT)
    hidden = python(f"from simreg_megatron.cpu import backend as c; c.activate(); {imported}", PYTHONPATH=path)
    assert hidden.stdout.splitlines()[-1:] == ["whole"], hidden.stderr
    seen = python(imported, PYTHONPATH=path)
    assert "undefined symbol" in seen.stderr and "whole" not in seen.stdout


@pytest.mark.megatron
@pytest.mark.parametrize("works", [True, False])
def test_megatron_s_helpers_are_built_by_this_python_or_a_sentence_says_why_not(works: bool) -> None:
    code = (
        "from simreg_megatron.cpu import backend; backend.activate()\n"
        "import os, sys; from simreg_megatron.cpu import adaptations\n"
        "def build():\n"
        "    print('first on the PATH:', os.environ['PATH'].partition(':')[0])\n"
        f"    {'pass' if works else 'sys.exit(1)'}\n"
        "adaptations._build_for_this_python(build)\n"
        "print('restored:', os.environ['PATH'])"
    )
    done = python(code, PATH="/usr/bin:/bin")
    assert f"first on the PATH: {Path(sys.executable).parent}" in done.stdout
    assert done.returncode == (0 if works else 1)
    assert ("restored: /usr/bin:/bin\n" in done.stdout) == works
    assert ("error: Megatron could not build its dataset helpers" in done.stderr) != works
