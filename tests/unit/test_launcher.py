# SPDX-License-Identifier: Apache-2.0
"""The launch scripts: presets against the paper's table, the user's flags, data, hardware, and both ways to start."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch import launcher, preflight, record, sizes
from launch.dry_run import command, describe
from launch.flags import LaunchError, flag_name, flag_names, flag_value, flatten, group_flags, read_preset
from launch.options import PRESETS, RECIPES, make_parser
from launch.plan import build_plan
from launch.planned import Machine, Plan, resumed
from simreg_megatron.tools.tokens import PairWriter
from tests.helpers import jobs
from tests.megatron import runs

SLOW = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "launch" / name for name in ("pretrain_llama.sh", "pretrain_mixtral.sh", "pretrain_hybrid.sh")]
CPU = Machine()
GPU = Machine(gpus=8, transformer_engine=True, world_size=8, local_world_size=8)
WHOLE_NODES = replace(GPU, world_size=48)
WHOLE = replace(GPU, apex_gradient_kernel=True)
OWN = ("--data", "text", "--tokenizer", "tokenizer.model")
OFF = ("SimReg is off: add --simreg-lambda 1 to train with it",)
OFF_OF_A_SIZE = ("SimReg is off: add --simreg-lambda auto or --recipe paper to train with it",)

# layers, heads, hidden, FFN, global batch, peak, end, steps, experts, parameters in millions with 32,000 ids
PAPER = {
    ("llama", "350m"): (24, 16, 1024, 2371, 512, 4e-4, 4e-5, 12500, None, 341),
    ("llama", "1.3b"): (24, 32, 2048, 5461, 2048, 3e-4, 3e-5, 12500, None, 1339),
    ("llama", "3b"): (26, 32, 3072, 8640, 2048, 3e-4, 3e-5, 12500, None, 3249),
    ("llama", "7b"): (32, 32, 4096, 11008, 2048, 3e-4, 3e-5, 12500, None, 6738),
    ("mixtral", "8x1b"): (24, 32, 2048, 5632, 512, 3e-4, 3e-5, 50000, 8, 7178),
}
ALL = [*PAPER, ("llama", "tiny"), ("mixtral", "tiny"), ("hybrid", "tiny"), ("hybrid", "350m")]


def plan(*words: str, family: str = "llama", machine: Machine = CPU, environ: dict[str, str] | None = None) -> Plan:
    options, rest = make_parser(family).parse_known_args(list(words))
    return build_plan(family, options, rest, machine, environ=environ or {})


def values(made: Plan, name: str) -> list[str]:
    return [" ".join(flag[1:]) for flag in made.flags if flag_name(flag) == name]


@pytest.mark.parametrize(("family", "model"), PAPER)
def test_presets_hold_the_papers_table(family: str, model: str) -> None:
    layers, heads, hidden, ffn, batch, peak, end, steps, experts, millions = PAPER[family, model]
    made = plan("--model", model, *OWN, family=family, machine=GPU)
    numbers = {
        "--num-layers": layers, "--num-attention-heads": heads, "--hidden-size": hidden, "--ffn-hidden-size": ffn,
        "--global-batch-size": batch, "--lr": peak, "--min-lr": end, "--train-iters": steps, "--seq-length": 2048,
        "--max-position-embeddings": 2048, "--lr-warmup-iters": 2000, "--adam-beta1": 0.9, "--adam-beta2": 0.95,
        "--weight-decay": 0.1, "--init-method-std": 0.01, "--clip-grad": 1.0,
    }  # fmt: skip
    assert {name: [float(value) for value in values(made, name)] for name in numbers} == {
        name: [number] for name, number in numbers.items()
    }
    words = {
        "--position-embedding-type": "rope", "--normalization": "RMSNorm", "--norm-epsilon": "1e-5", "--swiglu": "",
        "--disable-bias-linear": "", "--untie-embeddings-and-output-weights": "", "--hidden-dropout": "0",
        "--attention-dropout": "0", "--optimizer": "adam", "--adam-eps": "1e-8",
    }  # fmt: skip
    assert {name: values(made, name) for name in words} == {name: [word] for name, word in words.items()}
    assert values(made, "--lr-decay-style") == ["cosine"]
    assert values(made, "--num-experts") == ([str(experts)] if experts else [])
    assert values(made, "--moe-router-topk") == (["2"] if experts else [])
    assert round(sizes.count_parameters(made.flags, vocabulary=32000) / 1e6) == millions
    assert values(made, "--group-query-attention") == []


def test_hybrid_models() -> None:
    """A pattern is all that makes one; on the CPU and without Transformer Engine its layers are ours."""
    llama, tiny = (read_preset(PRESETS / f"{name}-tiny.args") for name in ("llama", "hybrid"))
    assert tiny == [("--hybrid-layer-pattern", "*-*-*-*-"), *llama[1:]]
    granite = plan("--model", "350m", *OWN, family="hybrid", machine=GPU)
    assert sizes.count_parameters(granite.flags, vocabulary=100352) == 340_332_224, "340M, says its card"
    assert sizes.count_parameters(tiny, vocabulary=9) == sizes.count_parameters(llama, vocabulary=9)
    plans = granite, plan(family="hybrid"), plan(*tiny[0], machine=Machine(gpus=1))
    assert [values(made, "--spec") for made in plans] == [[], *[["simreg_megatron.cpu.hybrid LOCAL"]] * 2]
    with pytest.raises(LaunchError, match=r"M-\* has other layers than attention .* which need a GPU"):
        plan("--hybrid-layer-pattern", "M-*")


def test_tiny_shares_its_batch_over_the_ranks() -> None:
    alone, pair = plan(), plan(machine=Machine(world_size=2, local_world_size=2))
    assert values(alone, "--micro-batch-size") == ["8"]
    assert values(pair, "--micro-batch-size") == ["4"]
    machine = Machine(world_size=2, local_world_size=2)
    assert values(plan("--tensor-model-parallel-size", "2", machine=machine), "--micro-batch-size") == ["8"]
    # With one micro-batch the second pipeline stage would wait for the first all the time.
    assert values(plan("--pipeline-model-parallel-size", "2", machine=machine), "--micro-batch-size") == ["4"]
    assert values(plan("--rampup-batch-size", "4", "2", "99", machine=machine), "--micro-batch-size") == ["1"]
    three = plan(machine=Machine(world_size=3, local_world_size=3))
    assert values(three, "--global-batch-size") == ["9"] and any("3 data-parallel" in note for note in three.notes)


def test_a_short_run_gets_a_shorter_warmup() -> None:
    assert values(plan("--train-iters", "20"), "--lr-warmup-iters") == ["2"]
    assert values(plan("--train-iters", "41"), "--lr-warmup-iters") == ["40"]
    assert values(plan("--train-iters", "20", "--lr-warmup-iters", "0"), "--lr-warmup-iters") == ["0"]
    assert values(plan("--lr-warmup-fraction", "0.1"), "--lr-warmup-iters") == [], "Megatron takes one of the two"


def test_hardware_chooses_layers_and_precision() -> None:
    cpu, te, local = plan(), plan(machine=GPU), plan(machine=Machine(gpus=1))
    assert values(cpu, "--distributed-backend") == ["gloo"] and values(cpu, "--bf16") == []
    assert cpu.environment["SIMREG_CPU"] == "1" and "SIMREG_CPU" not in te.environment
    assert values(te, "--transformer-impl") == ["transformer_engine"] and values(te, "--bf16") == [""]
    assert values(local, "--transformer-impl") == ["local"] and values(local, "--no-persist-layer-norm") == [""]
    assert values(plan("--fp16", machine=GPU), "--bf16") == []
    forced = plan("--simreg-cpu=force", machine=Machine(gpus=1))
    assert values(forced, "--distributed-backend") == ["gloo"]


@pytest.mark.parametrize(
    ("words", "machine", "sentence"),
    [
        (("--model", "350m", *OWN), CPU, "needs a GPU and this machine has none"),
        ((), Machine(gpus=1, world_size=2, local_world_size=2), "give torchrun --nproc-per-node 1"),
        (("--model", "350m", *OWN), WHOLE_NODES, "give --global-batch-size 528 "),
        (
            ("--model", "7b", *OWN, "--tensor-model-parallel-size", "4", "--global-batch-size", "9"),
            WHOLE_NODES,
            "or give --global-batch-size 12 ",
        ),
        (("--recipe", "paper", "--simreg-objective", "creg"), CPU, "--recipe paper decides --simreg-objective"),
    ],
)
def test_settings_that_cannot_run_are_refused(words: tuple[str, ...], machine: Machine, sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence) as refused:
        plan(*words, machine=machine)
    assert "\n" not in str(refused.value)


def test_ffn_sizes_that_do_not_split_name_those_that_do() -> None:
    split = ("--tensor-model-parallel-size", "2")
    with pytest.raises(LaunchError, match=r"2371 cannot be split .* --ffn aligned \(2432\), --ffn SIZE"):
        plan("--model", "350m", *OWN, *split, machine=WHOLE)
    assert values(plan("--model", "350m", *OWN, *split, "--ffn", "2736", machine=GPU), "--ffn-hidden-size") == ["2736"]
    aligned = plan("--model", "1.3b", *OWN, *split, "--ffn", "aligned", machine=WHOLE)
    assert values(aligned, "--ffn-hidden-size") == ["5504"] and aligned.notes == OFF_OF_A_SIZE


@pytest.mark.parametrize("size", [2371, 5461, 8640, 11008, 512])
@pytest.mark.parametrize("split", [1, 2, 3, 4, 8])
def test_aligned_sizes_split_evenly(size: int, split: int) -> None:
    nearest = sizes.aligned_size(size, split)
    assert nearest % 128 == 0 and nearest % split == 0 and nearest // split % 8 == 0
    assert abs(nearest - size) <= math.lcm(128, 8 * split) / 2


def test_only_real_sizes_save_and_where_they_save_no_clock_is_read() -> None:
    real = plan("--model", "7b", *OWN, "--simreg-lambda", "auto", machine=GPU)
    assert values(real, "--save") == ["runs/llama-7b-simreg-auto/checkpoints"]
    assert values(plan(), "--save") == []
    assert values(plan("--output", "here"), "--tensorboard-dir") == ["here/tensorboard"]


@pytest.mark.parametrize(
    "words", [("--simreg-lambda", "0"), ("--simreg-objective=none",), ("--recipe", "baseline"), ("--recipe", "paper")]
)
def test_a_chosen_setting_gets_no_reminder(words: tuple[str, ...]) -> None:
    assert plan("--model", "tiny", *words).notes == () != plan("--model", "tiny").notes


def test_megatron_path(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"has no pretrain_gpt\.py"):
        plan(environ={"MEGATRON_PATH": str(tmp_path)})
    (tmp_path / "pretrain_gpt.py").touch()
    made = plan(environ={"MEGATRON_PATH": str(tmp_path)})
    assert made.script == tmp_path / "pretrain_gpt.py"
    (tmp_path / "pretrain_hybrid.py").touch()
    made = plan(family="hybrid", environ={"MEGATRON_PATH": str(tmp_path)})
    assert made.script == tmp_path / "pretrain_hybrid.py"
    assert plan().script == ROOT / "simreg_megatron" / "pretrain.py"


@pytest.mark.parametrize(("words", "gpus"), [([], 1), (["--simreg-cpu"], 0), (["--simreg-cpu=force"], 0)])
def test_a_dry_run_of_a_real_size_is_planned_for_gpus(words: list[str], gpus: int, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert launcher._assume_gpus(CPU, "350m", words).gpus == gpus


def test_dry_run_prints_a_command_that_reads_back_as_the_plan() -> None:
    made = plan("--data", "my text", "--tokenizer", "$HOME/t.model")
    text = describe(made, CPU, environ={})
    assert f"{sizes.count_parameters(made.flags, vocabulary=32000):,} parameters" in text
    assert "2,048 per step, 400 steps, 819,200 in all" in text and "data      yours\n" in text
    words = shlex.split(command(made, CPU, environ={}).replace("\\\n", ""))
    assert words[-len(made.arguments) :] == made.arguments
    assert words[: words.index("-m")][0] == "env" and "SIMREG_CPU=1" in words
    environ = {"PYTHONPATH": "/site", "MEGATRON_PATH": "/megatron"}
    assert f"PYTHONPATH=/megatron:{ROOT}:/site" in command(made, CPU, environ=environ).split()
    two_nodes = {"MASTER_ADDR": "first", "GROUP_RANK": "1"}
    across = command(made, Machine(world_size=4, local_world_size=2), environ=two_nodes)
    assert "--nnodes 2 --node-rank 1 --master-addr first" in across and "--standalone" not in across


def run_script(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # As for a user: no rank of a torchrun above, and this test's Python as the active environment.
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environ = {**kept, "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
    return jobs.run(words, cwd=cwd, env=environ)


def test_help_is_printed_once_and_modules_of_the_working_folder_stay_closed(tmp_path: Path) -> None:
    for name in ("torch", "megatron", "difflib", "argparse"):
        (tmp_path / f"{name}.py").write_text("print('usage: ')")
    assert run_script("bash", str(SCRIPTS[0]), "--model", "7b", "-h", cwd=tmp_path).stdout.count("usage: ") == 1


def test_bash_without_a_python_that_fits_says_make_setup(tmp_path: Path) -> None:
    # A PATH with what the script needs except a Python, and a copy of it without a .venv next to it.
    (tools := tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        found = jobs.run(["which", name], check=True).stdout.strip()
        (tools / name).symlink_to(found)
    (launch := tmp_path / "launch").mkdir()
    for source in (SCRIPTS[0], ROOT / "launch" / "start.bash"):
        (launch / source.name).write_text(source.read_text())
    done = run_script("bash", str(launch / SCRIPTS[0].name), cwd=tmp_path, PATH=str(tools), VIRTUAL_ENV="/none")
    assert done.returncode == 2 and "make setup" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (("--lr", "a b"), {"NPROC_PER_NODE": "3"}, "--nproc-per-node=3 --standalone SCRIPT --lr 'a b'"),
        (("--shutdown-timeout", "9"), {}, "--shutdown-timeout=9 --nproc-per-node=4 --standalone SCRIPT"),
        ((), {"MASTER_PORT": "1"}, "--nproc-per-node=4 --master-port=1 SCRIPT"),
        (
            (),
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "--nproc-per-node=4 --nnodes=2 --node-rank=1 --master-addr=h --master-port=1 SCRIPT",
        ),
        (  # as pods set them
            ("--lr", "1"),
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:1"},
            "--nproc-per-node=1 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:1 SCRIPT --lr 1",
        ),
    ],
)  # fmt: skip
def test_bash_hands_torchrun_its_flags(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], expected: str
) -> None:
    # A Python that can import everything, sees four GPUs and shows what it is asked to run.
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        "#!/usr/bin/env bash\nif [[ $1 == -c ]]; then [[ $2 == *device_count* ]] && echo 4; exit 0; fi\n"
        "[[ $1 == */launch/preflight.py ]] && exit 0\n"
        "printf '%s\\n' \"$@\"\n"
    )
    python.chmod(0o755)
    done = run_script("bash", str(SCRIPTS[0]), *words, cwd=tmp_path, **{"VIRTUAL_ENV": str(tmp_path), **variables})
    started = [str(ROOT / "launch" / "agent.py"), *shlex.split(expected.replace("SCRIPT", str(SCRIPTS[0])))]
    assert done.stdout.splitlines() == started, done.stderr


def print_what_megatron_does_not_know(lines: list[str]) -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for line in lines:
        print(parser.parse_known_args(line.split())[1])


@pytest.mark.megatron
def test_megatron_knows_every_flag_of_every_preset(tmp_path: Path) -> None:
    lines = []
    for family, model in ALL:
        machines = [GPU] if family == "hybrid" else [GPU, Machine(gpus=1)]
        machines += [CPU] if model == "tiny" else []
        words = ["--model", model, *([] if model == "tiny" else OWN)]
        lines += [" ".join(plan(*words, family=family, machine=machine).arguments) for machine in machines]
    lines.append("--no-such-flag")  # shows that an unknown one would be seen
    done = runs.forked(print_what_megatron_does_not_know, lines, folder=tmp_path)
    assert done.status == 0, done.output
    answers = [line for line in done.output.splitlines() if line.startswith("[")]
    assert answers == ["[]"] * (len(lines) - 1) + ["['--no-such-flag']"]


def test_the_users_buckets_stay() -> None:
    size = ("--model", "7b", *OWN)
    assert values(plan(*size, "--ddp-bucket-size", "5", machine=GPU), "--ddp-bucket-size") == ["5"]
    for other in (("--ddp-num-buckets", "5"), ("--use-torch-fsdp2",)):
        assert values(plan(*size, *other, machine=GPU), "--ddp-bucket-size") == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_adagc_and_one_objective(recipe: str) -> None:
    made = plan("--model", "350m", *OWN, "--recipe", recipe, machine=GPU)
    adagc = {"--adagc": [""], "--adagc-lambda-rel": ["1.04"], "--adagc-beta": ["0.99"]}
    assert {name: values(made, name) for name in adagc} == adagc
    own_name = [] if recipe in ("paper", "paper-full", "baseline") else [recipe]
    assert values(made, "--simreg-objective") == own_name
    weights = {"baseline": [], "paper": ["auto"], "paper-full": ["auto"]}
    assert values(made, "--simreg-lambda") == weights.get(recipe, ["0.1"])
    assert values(made, "--simreg-temperature") == [], "each objective has its own"
    assert values(made, "--simreg-chunk-size") == (["0"] if recipe == "paper-full" else [])
    plain = plan("--model", "350m", *OWN, machine=GPU)
    own = [flag for flag in made.flags if not flag_name(flag).startswith(("--adagc", "--simreg"))]
    end = ("--save-interval", "500")
    assert own[: own.index(end)] == list(plain.flags[: plain.flags.index(end)])


def test_megatron_alone_is_without_the_plugin() -> None:
    made = plan("--plain", "--lr", "1e-3")
    assert made.plain and not plan().plain
    assert not [flag for flag in made.flags if flag_name(flag).startswith("--simreg-")]
    assert "-m simreg_megatron --plain" in command(made, CPU, environ={})
    for words in (["--simreg-lambda", "1"], ["--simreg-objective", "none"], ["--adagc"], ["--recipe", "paper"]):
        with pytest.raises(LaunchError, match=f"--plain leaves the plugin out, and {words[0]} is the plugin's"):
            plan("--plain", *words)


@pytest.mark.parametrize(
    ("objective", "options", "has_chunks"),
    [("simreg:auto,sigreg:0.05", "", True), ("mic:1", "mic.pool=chunk", True), ("prefixes-ce:1", "", False)],
)
def test_the_tiny_preset_has_chunks_for_objectives_with_chunks(objective: str, options: str, has_chunks: bool) -> None:
    weight = () if ":" in objective else ("--simreg-lambda", "1")
    words = ("--simreg-objective-options", options) if options else ()
    made = plan("--simreg-objective", objective, *weight, *words)
    assert values(made, "--simreg-chunk-size") == (["64"] if has_chunks else [])
    assert values(made, "--simreg-temperature") == []


class TestGoingOn:
    """--auto-resume: the same command for the first start and for all others."""

    def asked(self, *words: str) -> Plan:
        return plan("--auto-resume", "--save-interval", "5", "--output", "out", *words)

    def test_what_a_start_needs_is_dropped_where_a_run_goes_on(self) -> None:
        """Otherwise each slice would silently reset its optimizer."""
        start = ("--load", "other", "--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step", "7")
        start += ("--override-ckpt-iteration", "2", "--load-main-params-from-ckpt", "--no-save-rng")
        first = self.asked(*start)
        assert values(first, "--load") == ["other"] and values(first, "--finetune") == [""]
        later = resumed(first)
        assert values(later, "--load") == ["out/checkpoints"]
        left = {flag_name(flag) for flag in later.flags} & {flag_name((word,)) for word in start if word[:2] == "--"}
        assert left == {"--load", "--no-load-rng", "--no-save-rng"}, "what is not saved is not loaded"

    def test_an_evaluation_is_no_end(self, tmp_path: Path) -> None:
        words = ("--output", str(tmp_path), "--train-iters", "9")
        record.mark_ended(evaluates := self.asked(*words, "--skip-train"))
        assert not record.has_ended(self.asked(*words)), "nothing was trained"
        record.mark_ended(self.asked(*words))
        assert record.has_ended(self.asked(*words)) and not record.has_ended(evaluates)

    def test_a_dry_run_goes_on_where_the_run_would(self, tmp_path: Path, monkeypatch, capsys) -> None:
        """It once printed a command that began at step 0, over the checkpoints that are there."""
        monkeypatch.setattr(launcher.preflight, "check_with_megatron", lambda *_: None)
        monkeypatch.setenv("RANK", "0")
        words = ("--auto-resume", "--save-interval", "5", "--output", str(tmp_path), "--train-iters", "9")
        options, rest = make_parser("llama").parse_known_args(words)
        made = build_plan("llama", options, rest, CPU, environ={})
        for is_there in (False, True):
            launcher._preview(made, options, CPU)
            printed = capsys.readouterr().out
            assert (
                ("# resumes   from iteration 5" in printed) == is_there == (f"--load {tmp_path}/checkpoints" in printed)
            )
            assert "would do nothing" not in printed
            record.mark_ended(made)  # and then go back to iteration 5
            checkpoint = tmp_path / "checkpoints" / "iter_0000005"
            checkpoint.mkdir(parents=True, exist_ok=True)
            for name in ("metadata.json", ".metadata"):
                (checkpoint / name).write_text("{}")
        (tmp_path / "checkpoints" / "iter_0000005").rename(tmp_path / "checkpoints" / "iter_0000009")
        gone = ("--load", str(tmp_path / "gone"))  # where the run began, and what it does not read again
        launcher._preview(replace(made, flags=(*made.flags, gone)), options, CPU)
        assert "the run itself would do nothing: 9 iterations are done" in capsys.readouterr().out

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"length": 9}'])
    def test_a_damaged_mark_is_ignored(self, text: str, tmp_path: Path) -> None:
        (tmp_path / record.ENDED).write_text(text)
        assert not record.has_ended(self.asked("--output", str(tmp_path)))


class TestLayouts:
    NODES = Machine(gpus=8, transformer_engine=True, world_size=32, local_world_size=8)

    def test_a_layout_goes_between_the_preset_and_the_user(self) -> None:
        words = ("--model", "8x1b", "--layout", "h800", *OWN)
        made = plan(*words, family="mixtral", machine=self.NODES)
        assert values(made, "--expert-model-parallel-size") == ["8"] and values(made, "--micro-batch-size") == ["4"]
        assert values(made, "--nodes") == [], "the job's, not Megatron's"
        mine = plan(*words, "--expert-model-parallel-size", "2", family="mixtral", machine=self.NODES)
        assert values(mine, "--expert-model-parallel-size") == ["2"]


class TestRecord:
    def test_a_start_is_recorded_without_secrets(self, tmp_path: Path) -> None:
        made = plan("--output", str(tmp_path))
        hush = secrets.token_hex(8)  # the record holds uncommitted changes too, perhaps this file
        environ = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": hush, "HF_TOKEN": hush, "MY_PASSWORD": hush}
        folder = record.write(made, "20260101-000000", environ=environ)
        assert {path.name for path in folder.iterdir()} >= {"command.txt", "flags.txt", "versions.json"}
        assert (folder / "environment.txt").read_text() == "NCCL_DEBUG=INFO\n"
        assert hush not in "".join(path.read_text() for path in folder.iterdir())
        assert json.loads((folder / "versions.json").read_text())["packages"]["torch"]
        assert flatten(group_flags(shlex.split((folder / "flags.txt").read_text()))) == made.arguments

    def test_flags_that_a_resume_changes_are_named(self, tmp_path: Path) -> None:
        first, other = (plan("--output", str(tmp_path), "--seed", seed) for seed in ("1", "2"))
        assert record.changes_of_flags(first) == []
        record.write(first, "20260101-000000", environ={})
        assert record.changes_of_flags(resumed(first)) == []
        assert "from the last start of this run: --seed (see" in record.changes_of_flags(resumed(other))[0]

    def test_changes_and_the_text_of_a_job_are_masked(self, tmp_path: Path, monkeypatch) -> None:
        says = "export WANDB_API_KEY=hunter2 NCCL_DEBUG=INFO\ncurl https://me:hunter2@host.example"
        monkeypatch.setattr(record, "_run", lambda command: says)
        folder = record.write(plan("--output", str(tmp_path)), "20260101-000000", environ={"SLURM_JOB_ID": "7"})
        for name in ("changes.patch", "job.sbatch"):
            assert (folder / name).read_text() == (
                "export WANDB_API_KEY=*** NCCL_DEBUG=INFO\ncurl https://***@host.example\n"
            )


class TestLongRunsOnGpus:
    WORDS = ("--model", "7b", "--data", "text", "--tokenizer", "tokenizer.model")

    def test_they_waste_no_kernel_and_wait_for_the_first_rank(self) -> None:
        made = plan(*self.WORDS, machine=GPU)
        names = flag_names(made.flags)
        assert {"--cross-entropy-loss-fusion", "--manual-gc", "--no-create-attention-mask-in-dataloader"} <= names
        for given, excluded in (
            ("--deterministic-mode", "--cross-entropy-loss-fusion"),
            ("--save-params-interval 9", "--overlap-param-gather"),
            ("--transformer-impl local", "--no-create-attention-mask-in-dataloader"),
        ):
            assert excluded in names - flag_names(plan(*self.WORDS, *given.split(), machine=GPU).flags)
        assert values(made, "--distributed-timeout-minutes") == ["30"]
        own = plan(*self.WORDS, "--distributed-timeout-minutes", "5", machine=GPU)
        assert values(own, "--distributed-timeout-minutes") == ["5"]
        assert not {"--cross-entropy-loss-fusion", "--manual-gc"} & flag_names(plan(machine=GPU).flags), "the tiny one"

    def test_a_kernel_of_apex_is_used_if_it_is_there(self) -> None:
        without, whole = plan(*self.WORDS, machine=GPU), plan(*self.WORDS, machine=WHOLE)
        assert "--no-gradient-accumulation-fusion" in flag_names(without.flags) - flag_names(whole.flags)

    def test_a_missing_transformer_engine_is_noted(self) -> None:
        made = plan(*self.WORDS, machine=replace(GPU, transformer_engine=False))
        assert "Transformer Engine is not installed" in made.notes[1] and len(plan(*self.WORDS, machine=GPU).notes) == 1

    @pytest.mark.parametrize(
        ("words", "queues"),
        [
            ((), "1"),
            (("--overlap-moe-expert-parallel-comm",), "32"),
            (("--overlap-moe-expert-parallel-comm", "--tensor-model-parallel-size", "2"), "1"),
            (("--overlap-moe-expert-parallel-comm", "--context-parallel-size", "2"), "1"),
        ],
    )
    def test_experts_overlap_in_several_queues(self, words: tuple[str, ...], queues: str) -> None:
        """One lost the overlap without a word; tensor and context parallelism need the order of one."""
        made = plan("--model", "8x1b", *self.WORDS[2:], *words, family="mixtral", machine=GPU)
        assert made.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == queues


NAMES_OF_SECRETS = """
AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN AZURE_CLIENT_SECRET AZURE_STORAGE_SAS_TOKEN GOOGLE_APPLICATION_CREDENTIALS HF_TOKEN
WANDB_API_KEY GH_PAT DOCKER_AUTH_CONFIG REGISTRY_PASS PGPASSWORD MYSQL_PWD DATABASE_DSN SLACK_WEBHOOK SSH_AUTH_SOCK
GPG_PASSPHRASE SESSION_COOKIE BEARER_HEADER SIGNATURE_V4 LOGIN_PIN USER_OTP
"""


class TestRecordsKeepNoSecrets:
    def test_secrets_are_known_by_name(self) -> None:
        secrets_there = NAMES_OF_SECRETS.split()
        kept = ["HOME", "PATH", "PWD", "OLDPWD", "SLURM_JOB_ID", "NCCL_IB_HCA", "CUDA_HOME", "SPATIAL", "PYTHONPATH"]
        assert record.shown(dict.fromkeys([*secrets_there, *kept], "x")) == sorted(kept)

    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ("https://me:hunter2@host.example/simple", "https://***@host.example/simple"),
            ("--wandb-api-key abc123 --lr 1", "--wandb-api-key *** --lr 1"),
            ("--wandb-password 'correct horse' '--lr' 1", "--wandb-password *** '--lr' 1"),
            ("env 'DB_PASSWORD=correct horse' X=1", "env 'DB_PASSWORD=***' X=1"),
            ("s3://bucket/a@b https://host/x@y", "s3://bucket/a@b https://host/x@y"),
            ("--tokenizer-model t.model", "--tokenizer-model t.model"),
            ("+export HF_TOKEN=abc; NCCL_DEBUG=INFO", "+export HF_TOKEN=***; NCCL_DEBUG=INFO"),
            ("export DB_PASSWORD='two words' X=1", "export DB_PASSWORD=*** X=1"),
            ("""export DB_PASSWORD='two'"'"' words' X=1""", "export DB_PASSWORD=*** X=1"),  # of shlex.quote
        ],
    )
    def test_secrets_are_masked_by_shape(self, text: str, kept: str) -> None:
        assert record.masked(text) == kept


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "ce"),
        ("--recipe paper-full", "simreg-auto-whole"),
        ("--simreg-lambda 1 --simreg-temperature 0.1 --simreg-chunk-size 256", "simreg-1-tau-0.1-chunk-256"),
    ],
)
def test_runs_that_train_on_something_else_have_another_folder(words: str, name: str) -> None:
    made = plan("--model", "350m", *OWN, *words.split(), machine=GPU)
    assert str(made.output) == f"runs/llama-350m-{name}"


def test_a_length_in_samples_replaces_the_presets_iterations() -> None:
    made = plan("--train-samples", "1000")
    assert not {"--train-iters", "--lr-warmup-iters"} & flag_names(made.flags)
    assert flag_value(made.flags, "--lr-warmup-samples") == "100", "a tenth: the preset's 40 steps of 8 are more"
    assert "1,000 samples, 256,000 in all" in describe(made, CPU, environ={})
    chosen = plan("--train-samples", "1000", "--lr-warmup-samples", "7")
    assert flag_value(chosen.flags, "--lr-warmup-samples") == "7"


@pytest.mark.parametrize(
    ("words", "has_note"),
    [("--simreg-lambda 10", True), ("--simreg-lambda auto", False), ("--simreg-objective simreg:auto,sce:0.05", False)],
)
def test_a_lambda_for_another_width_is_noted(words: str, has_note: bool) -> None:
    text = describe(plan("--model", "tiny", *words.split()), CPU, environ={})
    assert ("lambda 10 is large for width 192, where the authors' rule (auto) gives 4.3" in text) == has_note
    assert "is large" not in describe(plan("--model", "350m", *OWN, *words.split(), machine=GPU), GPU, environ={})
    other = plan("--model", "tiny", "--simreg-objective", "sigreg", "--simreg-lambda", "auto")
    assert "auto is the rule for simreg and says nothing about sigreg" in describe(other, CPU, environ={})


def test_names_of_models_have_no_case() -> None:
    assert plan("--model", "7B", *OWN, machine=replace(GPU, world_size=16)).model == "7b"


def test_a_run_without_validation_has_no_share_for_it() -> None:
    assert values(plan(*OWN), "--split") == ["99,1,0"]
    assert values(plan(*OWN, "--eval-iters", "0"), "--split") == ["100,0,0"]


def test_a_shared_clone_that_cannot_be_written_keeps_its_index_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.plan.BUILTIN_CORPUS", ROOT / "docs")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert values(plan("--output", "mine"), "--data-cache-path") == ["mine/cache"]
    monkeypatch.undo()
    assert values(plan("--output", "mine"), "--data-cache-path") == []


def test_runs_on_one_text_have_an_index_each() -> None:
    """Two that start at once would write the same files; ranks of a tiny run may differ by a second."""
    assert values(plan(*OWN, "--output", "mine"), "--data-cache-path") == ["mine/cache"]
    assert values(plan(*OWN, "--output", "mine", "--data-cache-path", "its"), "--data-cache-path") == ["its"]
    options, words = make_parser("llama").parse_known_args(list(OWN))
    made = [build_plan("llama", options, words, CPU, environ={}, stamp=stamp) for stamp in ("1", "2")]
    one, other = (values(each, "--data-cache-path") for each in made)
    assert one == other == ["runs/llama-tiny-ce/cache"] and made[0].output != made[1].output


@pytest.mark.parametrize(
    ("words", "variables", "sentence"),
    [
        (("--nproc-per-node", "0"), {}, "--nproc-per-node takes a positive number, not 0"),
        pytest.param(("--dry-run",), {"NNODES": "two"}, "--nnodes takes a positive number, not two", marks=SLOW),
        pytest.param(("--rdzv-backend=paper",), {}, "torchrun cannot start with these flags (The ", marks=SLOW),
    ],
)
def test_what_torchrun_would_end_in_a_traceback_with(words, variables, sentence: str, tmp_path: Path) -> None:
    done = run_script("bash", str(SCRIPTS[0]), *words, cwd=tmp_path, **variables)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {sentence}"), done.stderr


@pytest.mark.parametrize(
    ("name", "meant"),
    [("--lambda", "--simreg-lambda"), ("--tau", "--simreg-temperature"), ("--chunk-size", "--simreg-chunk-size"),
     ("--fp99", "leave it out"), ("--train-iter", "--train-iters")],
)  # fmt: skip
def test_flags_of_other_tools_get_a_hint(name: str, meant: str) -> None:
    assert meant in preflight.suggestion(name, ["--train-iters", "--load"])


def test_own_flags_are_checked_before_anything_slow(tmp_path: Path) -> None:
    check = "from launch import preflight; status = preflight.main(['pretrain_llama.sh', '--simreg-tau', '1'])"
    done = jobs.run([sys.executable, "-c", f"import sys; {check}; print('torch' in sys.modules, status)"], cwd=ROOT)
    assert done.stdout == "False 2\n" and "did you mean --simreg-temperature?" in done.stderr
    (tmp_path / "torch.py").write_text("import sys; sys.exit('imported')")  # would end every start
    for words, sentence in (
        ("--simreg-lambda ten", "SimReg lambda must be a finite number of 0 or more, or auto, not ten"),
        ("--recipe simreg", "argument --recipe: invalid choice: 'simreg' (choose from 'baseline', 'paper', "),
        ("7b", "'7b' belongs to no flag"),
    ):
        done = run_script("bash", str(SCRIPTS[0]), *words.split(), cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.returncode == 2 and done.stderr.startswith(f"error: {sentence}"), done.stderr


def test_an_output_that_nodes_do_not_share_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Megatron's first rank writes the indices of the text, and all others read them."""
    monkeypatch.setenv("RANK", "1")
    made = plan("--output", str(tmp_path), "--data-cache-path", str(tmp_path / "cache"))

    def reads(missing: Path) -> None:
        monkeypatch.setattr("simreg_megatron.__main__.run", lambda *_, **__: missing.read_bytes())
        launcher._train(made)

    with pytest.raises(LaunchError, match=r"cache/index.npy, which the first rank .* on a disk that all nodes share"):
        reads(tmp_path / "cache" / "index.npy")
    with pytest.raises(FileNotFoundError, match=r"another.npy"):
        reads(tmp_path / "another.npy")


def test_a_run_without_megatron_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    done = run_script(sys.executable, str(SCRIPTS[0]), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    sentence = "Megatron's training loop cannot be imported (ModuleNotFoundError: No module named 'megatron.core')"
    assert sentence in done.stderr


@pytest.mark.slow
@pytest.mark.megatron
def test_a_longer_run_is_asked_which_schedule_counts_and_a_document_mask_without_documents_is_said(
    tmp_path: Path,
) -> None:
    """A real run of two steps on text without end-of-document tokens, then the same with more steps."""
    pair = PairWriter(tmp_path / "text", 1000)
    for first in range(300):
        pair.add(range(first % 50, first % 50 + 40))
    pair.close()
    words = ["--data", str(tmp_path / "text"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    words += ["--eval-iters", "0", "--num-layers", "1", "--seq-length", "64", "--save-interval", "2"]
    words += ["--simreg-lambda", "1", "--simreg-document-mask", "--output", str(tmp_path / "run")]
    start = ("bash", str(SCRIPTS[0]), *words, "--auto-resume", "--train-iters")
    done = run_script(*start, "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning: --simreg-document-mask has no effect so far") == 1
    done = run_script(*start, "4", cwd=tmp_path)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and said.startswith("error: the checkpoint has another learning-rate schedule ("), said
    assert "do not match): add --override-opt_param-scheduler to take the new one, or --use-checkpoint-opt" in said
    assert "Traceback" not in done.stdout + done.stderr
    done = run_script(*start, "4", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "# resumes   from iteration 2" in done.stdout
    done = run_script(*start, "4", "--use-checkpoint-opt_param-scheduler", cwd=tmp_path)
    assert (
        done.returncode == 0 and json.loads((tmp_path / "run" / "ended.json").read_text())["length"] == "4 iterations"
    )


@pytest.mark.parametrize("trains", [True, False])
def test_megatron_is_imported_under_the_output_that_its_log_will_keep(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers of a log hold the stream that they find: under a silence that ends, all of it would be lost."""
    found = []
    monkeypatch.setattr(preflight, "_megatrons_parser", lambda **_: found.append(sys.stderr))
    preflight.check_with_megatron(plan(), CPU, trains=trains)
    assert (found == [sys.stderr]) is trains
    reads_all = argparse.Namespace(parse_known_args=lambda _: (None, []))
    monkeypatch.setattr(preflight, "_megatrons_parser", lambda **_: reads_all)
    for others in (("--yaml-cfg", "x"), ("--use-checkpoint-args",)):  # there is a Megatron, which is not asked
        assert preflight.check_with_megatron(plan(*others), CPU, trains=trains) == (None, None)
