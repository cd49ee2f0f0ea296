# SPDX-License-Identifier: Apache-2.0
"""The job that is submitted: its text, what differs between clusters, what is refused before it is queued."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import pytest

from launch import record
from launch.flags import LaunchError
from launch.options import LAYOUTS, PRESETS, TINY
from launch.planned import ROOT
from launch.slurm import chain, submit
from launch.slurm.job import DEFAULT, Site, read_site, render
from simreg_megatron.tools.tokens import PairWriter
from tests.helpers import jobs

LLAMA = "launch/pretrain_llama.sh"
CPU_SITE = "GPUS_PER_NODE=0\nTIME=60\n"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that name a text, which is not read here."""
    monkeypatch.setattr(submit, "_check_data", lambda *_, **__: None)
    return ["--data", "text", "--tokenizer", "tokenizer.model", "--output", str(tmp_path / "run")]


def site_file(folder: Path, text: str) -> Path:
    path = folder / "my.env"
    path.write_text(text)
    return path


def text_of(*argv: str) -> str:
    job, *_ = submit.prepare(argv, dict(os.environ))
    return render(job)


def value_of(text: str, name: str) -> list[str]:
    """Return bash's value of an array or variable of the rendered text."""
    head = text[: text.index("if ! { cd ")]
    script = f'{head}\nfor word in "${{{name}[@]}}"; do printf "%s\\0" "$word"; done'
    done = jobs.run(["bash", "-c", script], check=True)
    return done.stdout.split("\0")[:-1]


def test_the_head_of_a_real_size(data: list[str]) -> None:
    text = text_of("--time", "1-12", "--slices", "7", "--name", "mine", LLAMA, "--model", "7b", *data)
    head = text.splitlines()[:20]
    assert head[0] == "#!/bin/bash"
    for line in ("nodes=16", "ntasks-per-node=8", "cpus-per-task=12", "time=1-12", "array=1-7%1", "requeue"):
        assert f"#SBATCH --{line}" in head, line
    assert "#SBATCH --gpus-per-node=8" in head and "#SBATCH --exclusive" in head and "#SBATCH --mem=0" in head
    assert not any("account" in line or "partition" in line for line in head), "what is empty is left out"
    assert re.search(r"^#SBATCH --job-name=mine-[0-9a-f]{6}$", text, re.MULTILINE), "another run may have that name"
    assert "#@" not in text and "torchrun" not in text.replace("no torchrun", "")


def test_the_run_is_the_users_words(data: list[str]) -> None:
    odd = ["--wandb-exp-name", 'it\'s $HOME; `date` "quoted"']
    words = value_of(text_of(LLAMA, "--model", "7b", *data, *odd), "TRAIN")
    assert words[0] == str(ROOT / LLAMA) and words[-2:] == ["--auto-resume", "--exit-signal-handler"]
    assert words[words.index("--layout") + 1] == "h800"
    place = words.index("--wandb-exp-name")
    assert words[place : place + 2] == odd, "no shell reads them"


def test_a_job_runs_in_the_folder_where_it_was_submitted(tmp_path: Path, monkeypatch, data: list[str]) -> None:
    """In another one it once saved there, and the chain watched a folder that stayed empty."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    paths = ["--save", "kept", "--load=first", "--output", "../run"]
    text = text_of(LLAMA, "--model", "7b", *data, *paths)
    assert value_of(text, "FOLDER") == [str(folder)] and ' cd "${FOLDER:?' in text
    assert value_of(text, "TRAIN")[-len(paths) - 2 : -2] == paths
    assert value_of(text, "SAVE") == [str(folder / "kept")], "the chain watches what the run writes"


def test_the_text_is_a_script_that_bash_and_shellcheck_accept(data: list[str], tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(text_of(LLAMA, "--model", "7b", *data))
    jobs.run(["bash", "-n", str(path)], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if shellcheck.exists():
        done = jobs.run([str(shellcheck), str(path)])
        assert done.returncode == 0, done.stdout


def test_arrays_that_may_be_empty_are_no_error_in_an_old_bash() -> None:
    """Before 4.4, `set -u` ends a script at an empty array: CentOS 7 has 4.2, and without a container there are two."""
    bare = re.compile(r'(?<![+])"\$\{(\w+)\[@\]\}"')
    never_empty = {"TRAIN", "candidates"}
    scripts = [*(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch").rglob("*.sbatch")]
    strict = [path.read_text() for path in scripts if re.search(r"^set -\w*u", path.read_text(), re.MULTILINE)]
    assert len(strict) >= 4 and {name for text in strict for name in bare.findall(text)} <= never_empty


@pytest.mark.slow
def test_dry_run_prints_what_sbatch_is_given(data: list[str], tmp_path: Path) -> None:
    """With an sbatch that keeps its argument: the file it gets is the dry run's text, byte for byte."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "squeue").write_text("#!/bin/sh\n")
    (programs / "sbatch").write_text(f'#!/bin/sh\nfor last; do :; done; cp "$last" {tmp_path}/given\necho 17\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    site = site_file(tmp_path, CPU_SITE)
    run = [LLAMA, "--save-interval", "5", "--train-iters", "9", "--output", str(tmp_path / "run")]
    start = ["bash", str(ROOT / "launch" / "slurm" / "submit.sh"), "--cluster", str(site), "--nodes", "2"]
    (tmp_path / "none" / "megatron").mkdir(parents=True)
    (tmp_path / "none" / "megatron" / "__init__.py").touch()  # a Megatron without a parser, which takes seconds
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path / "none")}
    dry = jobs.run([*start, "--dry-run", *run], env=environment)
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"
    real = jobs.run([*start, *run], env=environment)
    assert real.returncode == 0 and "as job 17" in real.stdout, real.stderr
    assert (tmp_path / "given").read_text() == dry.stdout


def test_containers_hold_what_the_job_needs() -> None:
    common = {"container_image": "/images/train.sqsh", "container_mounts": "/data:/data,/work:/work"}
    pyxis = _rendered(Site(runtime="pyxis", **common))
    own = _rendered(Site(runtime="pyxis", environment={"NCCL_DEBUG": "INFO"}, **common))
    assert "--container-env=NCCL_DEBUG,PYTHONPATH" in value_of(own, "CONTAINER_SRUN"), "else the image's value wins"
    assert value_of(pyxis, "CONTAINER_SRUN") == [
        "--container-image=/images/train.sqsh", "--no-container-mount-home",
        "--container-env=PYTHONPATH", "--container-mounts=/data:/data,/work:/work", f"--container-workdir={Path.cwd()}",
    ]  # fmt: skip
    assert value_of(pyxis, "CONTAINER_RUN") == [] and value_of(pyxis, "PYTHON") == ["python3"]
    apptainer = _rendered(Site(runtime="apptainer", **common))
    assert value_of(apptainer, "CONTAINER_RUN")[:3] == ["apptainer", "exec", "--nv"]
    venv = _rendered(Site())
    assert value_of(venv, "PYTHON") == [sys.executable] == value_of(venv, "HOST_PYTHON")


def _rendered(site: Site) -> str:
    from launch.slurm.job import Job

    save = Path("/out/checkpoints")
    return render(Job("name", 2, "60", 3, 2, 600, Path("/out"), save, ("script", "--a", "b"), site))


@pytest.mark.parametrize(
    ("options", "words", "error"),
    [
        pytest.param(("--nodes", "3"), (), "24 data-parallel ranks: give --nodes 2 .* 2064 ", id="batch"),
        pytest.param((), ("--dry-run",), "put --dry-run before the script", id="dry-run"),
        pytest.param((), ("--time=5",), "put --time=5 before the script: there it is the job's", id="time"),
        pytest.param((), ("--pipeline-model-parallel-size", "3"), "TP 1 x PP 3 x CP 1 = 3 ranks, and 128", id="pp"),
        pytest.param((), ("--skip-train",), "a chain of slices trains: start an evaluation with torchrun", id="skip"),
        pytest.param((), ("--layout", "abacus"), "there is no layout abacus for llama 7b", id="layout"),
    ],
)
def test_what_would_fail_is_refused_before_it_is_queued(
    options: tuple[str, ...], words: tuple[str, ...], error: str, data: list[str]
) -> None:
    with pytest.raises(LaunchError, match=error):
        text_of(*options, LLAMA, "--model", "7b", *data, *words)


def test_a_run_that_has_ended_is_not_queued_and_a_longer_one_is(data: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / record.ENDED).write_text(json.dumps({"length": "12500 iterations"}))
    with pytest.raises(LaunchError, match="12500 iterations are done"):
        text_of(LLAMA, "--model", "7b", *data)
    text_of(LLAMA, "--model", "7b", *data, "--train-iters", "13000")


def test_blanks_in_the_head_of_a_job_are_quoted() -> None:
    """Unquoted, sbatch takes the rest of the line for other flags."""
    site = Site(sbatch_extra="--exclusive '--comment=two words'", constraint="[a|b]", qos="it's")
    lines = _rendered(site).splitlines()
    assert '#SBATCH "--qos=it\'s"' in lines
    assert "#SBATCH --exclusive" in lines and '#SBATCH "--comment=two words"' in lines
    assert "#SBATCH --constraint=[a|b]" in lines
    with pytest.raises(LaunchError, match="cannot stand in the head of a job"):
        _rendered(Site(qos="high\nrm x"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("PARTITON=gpu", "line 1: no setting is called PARTITON: it is one of ACCOUNT"),
        ("GPUS_PER_NODE=many", "GPUS_PER_NODE takes a number"),
        ("RUNTIME=pyxis", "RUNTIME=pyxis needs an image: set CONTAINER_IMAGE"),
    ],
)
def test_a_mistake_in_the_clusters_file_is_named(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        read_site(site_file(tmp_path, text), {})
    assert error in str(caught.value)


def test_a_job_has_the_tree_of_megatron_that_it_was_checked_with(data: list[str], tmp_path: Path) -> None:
    """sbatch may pass nothing on (SBATCH_EXPORT=NONE): then the installed Megatron ran, silently."""
    tree = tmp_path / "it's a tree"
    tree.mkdir()
    (tree / "pretrain_gpt.py").touch()
    site = site_file(
        tmp_path, f"{CPU_SITE}RUNTIME=pyxis\nCONTAINER_IMAGE=/i.sqsh\nCONTAINER_MOUNTS=/:/\nexport MEGATRON_PATH=\n"
    )
    words = ["--cluster", str(site), LLAMA, *data, "--save-interval", "5"]
    text = render(submit.prepare(words, {**os.environ, "MEGATRON_PATH": str(tree)})[0])
    assert value_of(text, "MEGATRON_PATH") == [str(tree)]
    assert "--container-env=MEGATRON_PATH,PYTHONPATH" in value_of(text, "CONTAINER_SRUN")


class TestWhatMegatronSays:
    """Megatron checks its own flags before a job is queued; if it cannot be asked, that is logged."""

    @pytest.mark.slow
    @pytest.mark.parametrize("named_by", ["the environment", "the cluster's file"])
    def test_a_source_tree_is_asked_in_place_of_the_installed_one(self, named_by: str, tmp_path: Path) -> None:
        """The installed Megatron's word was taken for a job that runs another release."""
        tree = tmp_path / "tree"
        (tree / "megatron" / "training").mkdir(parents=True)
        for name in ("pretrain_gpt.py", "megatron/training/__init__.py"):
            (tree / name).touch()
        (tree / "megatron" / "training" / "arguments.py").write_text(
            "def add_megatron_arguments(parser): parser.add_argument('--global-batch-size')\n"
            "def validate_args(args, defaults): raise AssertionError('so says the tree')\n"
        )
        given = named_by == "the environment"
        site = site_file(tmp_path, CPU_SITE + ("" if given else f"export MEGATRON_PATH={tree}\n"))
        words = ["--dry-run", "--cluster", str(site), LLAMA, "--train-iters", "5", "--save-interval", "5"]
        environ = {**os.environ, "MEGATRON_PATH": str(tree if given else tmp_path)}
        command = [sys.executable, "-m", "launch.slurm.submit", *words, "--output", str(tmp_path / "run")]
        asked = jobs.run(command, cwd=ROOT, env=environ)
        assert asked.returncode == 2 and "refuses these flags together: so says the tree" in asked.stderr, asked.stderr


def test_the_clusters_file_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    site = read_site(
        site_file(tmp_path, f'GPUS_PER_NODE=0\nCPUS_PER_TASK=\nACCOUNT="`touch {mark}`"\nexport HERE=$HOME/x#1 # note'),
        {"HOME": "/home/me"},
    )
    assert site.environment == {"HERE": "/home/me/x#1"} and site.cpus_per_task == "" and not mark.exists()


def test_the_default_settings_and_layouts_are_whole() -> None:
    site = read_site(DEFAULT, {})
    assert site.gpus_per_node == 8 and site.layout == "h800"
    sizes = {path.stem for path in PRESETS.glob("*.args") if not path.stem.endswith(TINY)}
    assert sizes == {path.stem for path in (LAYOUTS / "h800").glob("*.args")}


def _write_text(prefix: Path) -> None:
    """Write 500 documents of 4 tokens."""
    pair = PairWriter(prefix, 1000)
    for _ in range(500):
        pair.add(range(4))
    pair.close()


def test_the_python_of_a_node_is_enough_for_the_books() -> None:
    """The chain's books are kept by the system's Python, where nothing is installed."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import launch.slurm.chain; print(sorted(sys.modules))"
    done = jobs.run([sys.executable, "-S", "-c", script, str(ROOT)], check=True)
    foreign = {"torch", "numpy", "simreg_megatron", "typer", "rich"} & set(eval(done.stdout))
    assert not foreign


def test_a_login_nodes_own_python_submits_what_another_one_runs(tmp_path: Path, data: list[str]) -> None:
    """It checks what it can, says what it could not, and does not make a job of a Python without torch."""
    _write_text(tmp_path / "text")
    (tmp_path / "tokenizer.model").write_text("of another program")
    site = site_file(tmp_path, f"{CPU_SITE}PYTHON={sys.executable}\n")
    text, tokenizer = str(tmp_path / "text"), str(tmp_path / "tokenizer.model")
    words = ["--model", "tiny", *data, "--data", text, "--tokenizer", tokenizer]
    words += ["--save-interval", "5"]
    bare = [sys.executable, "-S", "-m", "launch.slurm.submit", "--cluster", str(site), "--dry-run", LLAMA, *words]
    done = jobs.run(bare, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert value_of(done.stdout, "PYTHON") == [sys.executable]
    assert re.search(r"has no sentencepiece, so the data is not checked here", done.stderr)
    assert "has no Megatron to ask, so its flags are not checked here" in done.stderr
    assert "> data      yours, 2,000 tokens, read 409.6 times\n" in done.stderr
    site.write_text(CPU_SITE)
    done = jobs.run(bare, cwd=ROOT)
    assert done.returncode == 2 and "which has no torch: activate the environment of the run" in done.stderr


def test_a_submission_needs_nothing_of_the_repository_but_launch() -> None:
    """The tools and the tests are for those who change the code: imports point from them to what runs."""
    script = "import sys, launch.launcher, launch.slurm.submit; print({n.partition('.')[0] for n in sys.modules})"
    done = jobs.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    assert not {"tools", "benchmarks", "tests"} & eval(done.stdout)


class TestBooks:
    """Decisions of `chain.py`, from the books alone."""

    @pytest.fixture
    def books(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> chain.Chain:
        for name, value in {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "9"}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "slurm").mkdir()
        return chain.Chain(tmp_path, tmp_path / "checkpoints")

    def at(self, books: chain.Chain, iteration: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chain.checkpoints, "newest_whole", lambda _: iteration)

    def slice(self, books: chain.Chain, start: int, end: int, status: int, monkeypatch: pytest.MonkeyPatch) -> int:
        books.ids["slice"] += 1
        self.at(books, start, monkeypatch)
        assert books.begin() == 0
        self.at(books, end, monkeypatch)
        return books.end(3, status)

    @pytest.mark.parametrize(
        ("slices", "ends"),
        [
            ([(0, 10, 1), (10, 20, 1), (20, 30, 1)], [0, 0, 0]),  # progress
            ([(10, 10, 1), (10, 20, 0), (20, 20, 1)], [0, 0, 0]),
            ([(10, 20, 1), (20, 20, 1)], [0, 2]),  # a failure after progress is the first of two
            ([(10, 20, 0), (20, 20, 1), (20, 20, 1)], [0, 0, 2]),  # a good end is none
        ],
    )
    def test_only_two_failures_without_progress_end(self, slices, ends, books, monkeypatch) -> None:
        assert [self.slice(books, *one, monkeypatch) for one in slices] == ends

    def test_a_slice_whose_node_died_is_no_failure(self, books, monkeypatch) -> None:
        self.at(books, 10, monkeypatch)
        assert books.begin() == 0  # and never ended
        assert self.slice(books, 10, 10, 1, monkeypatch) == 0

    def test_a_slice_that_slurm_starts_again_is_one(self, books, monkeypatch) -> None:
        """As where a node dies that is not the first one: the job's script lives, and notes the end."""
        self.at(books, 10, monkeypatch)
        assert [status for _ in range(2) for status in (books.begin(), books.end(3, 1))] == [0, 0, 0, 0]
        assert self.slice(books, 10, 10, 1, monkeypatch) == 2, "the next one failed, too"

    def test_slices_that_never_record_their_end_end_the_chain(self, books, monkeypatch, capsys) -> None:
        """A run that hangs until its time limit, whose job is ended before it can write."""
        self.at(books, 10, monkeypatch)
        assert [books.begin() for _ in range(4)] == [0] * 4, "SLURM restarted one slice"
        assert [books.ids.update(slice=number) or books.begin() for number in (2, 3, 4)] == [0, 0, 2]
        assert "3 slices began at iteration 10, and saved nothing" in capsys.readouterr().out
        self.at(books, 20, monkeypatch)
        assert books.begin() == 0, "progress"
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "6")
        self.at(books, 10, monkeypatch)
        assert chain.Chain(books.output, books.save).begin() == 0, "another submission"

    def test_a_disk_that_is_away_is_tried_again_by_the_jobs_script(self, books, monkeypatch, capsys) -> None:
        monkeypatch.setattr(chain.checkpoints, "newest_whole", Mock(side_effect=[LaunchError("away"), OSError(5), 30]))
        monkeypatch.setattr(sys, "argv", ["chain", "begin", "--output", str(books.output), "--save", str(books.save)])
        assert [chain.main() for _ in range(3)] == [1, 1, 0] and len(books.events()) == 1
        assert "begins at iteration 30" in capsys.readouterr().out
        monkeypatch.setattr(chain.checkpoints, "prune", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        self.at(books, 40, monkeypatch)
        assert books.end(3, 0) == 0 and "no checkpoint was deleted this time" in capsys.readouterr().out

    def test_a_line_that_was_cut_off_is_skipped(self, books, monkeypatch) -> None:
        assert self.slice(books, 0, 10, 0, monkeypatch) == 0
        with books.book.open("a") as file:
            file.write('{"chain": "5", "ev\n')
        assert self.slice(books, 10, 10, 1, monkeypatch) == 0
        assert [event["iteration"] for event in books.events()] == [0, 10, 10, 10]

    def test_books_that_cannot_be_kept_are_an_error(self, books, monkeypatch, capsys) -> None:
        books.book.mkdir()  # a folder cannot be appended to
        monkeypatch.setattr(sys, "argv", ["chain", "begin", "--output", str(books.output), "--save", str(books.save)])
        assert chain.main() == 1 and "Is a directory" in capsys.readouterr().out

    @pytest.mark.parametrize("name", [chain.STOP, record.ENDED])
    def test_the_end_and_the_stop_file_end(self, name: str, books, monkeypatch) -> None:
        self.at(books, 10, monkeypatch)
        assert books.begin() == 0
        (books.output / name).touch()
        assert books.end(3, 0) != 0 and books.begin() != 0

    @pytest.mark.parametrize("status", [0, 1])
    def test_two_slices_without_progress_end_the_chain(self, status: int, books, monkeypatch, capsys) -> None:
        assert self.slice(books, 10, 10, status, monkeypatch) == 0
        assert self.slice(books, 10, 10, status, monkeypatch) != 0
        assert "nothing saved beyond iteration 10, where the slice before it failed too" in capsys.readouterr().out

    def test_another_submission_begins_a_new_count(self, books, monkeypatch) -> None:
        assert self.slice(books, 10, 10, 1, monkeypatch) == 0
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "6")
        assert self.slice(chain.Chain(books.output, books.save), 10, 10, 1, monkeypatch) == 0

    def test_a_stop_is_repeated_until_a_process_acts_on_it(self, books, monkeypatch) -> None:
        there = Mock(side_effect=[LaunchError("the disk is away"), *[True] * 9])  # it once ended the watch
        monkeypatch.setattr(chain.checkpoints, "is_there", there)
        clock, calls = iter(range(0, 10_000, 50)), []
        monkeypatch.setattr(chain.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(chain.subprocess, "run", lambda command, **_: calls.append(command))

        def sleep(_: float) -> None:
            if len(calls) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(chain.time, "sleep", sleep)
        with pytest.raises(KeyboardInterrupt):
            books.watch(3, "17")
        assert calls == [["scancel", f"--signal={chain.SAVE_AND_LEAVE}", "17"]] * 3

    def test_what_a_living_run_is_writing_is_not_touched(self, books, tmp_path: Path) -> None:
        """Books hold no lock: the run itself deletes what was never finished, once it has the folder."""
        on_its_way = tmp_path / "checkpoints" / "iter_0000010"
        on_its_way.mkdir(parents=True)
        assert books.begin() == 0 and on_its_way.is_dir()

    def test_an_end_without_a_start_is_no_failure(self, books, monkeypatch) -> None:
        assert self.slice(books, 0, 10, 0, monkeypatch) == 0
        books.book.write_text(books.book.read_text().splitlines()[1] + "\n")
        assert self.slice(books, 10, 10, 1, monkeypatch) == 0


@pytest.mark.parametrize(
    ("begins", "runs", "ends", "status"),
    [(1, 0, 0, 1), (2, 0, 0, 2), (3, 0, 0, 0), (0, 7, 0, 7), (0, 7, 1, 7), (0, 0, 2, 2), (0, 7, 2, 7)],
)
def test_a_job_fails_where_its_chain_does(
    begins: int, runs: int, ends: int, status: int, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator sees COMPLETED where a job ends with 0: that is for chains that ended as they should."""
    site = site_file(tmp_path, f"{CPU_SITE}HOST_PYTHON={tmp_path}/python\n")
    job = text_of("--cluster", str(site), LLAMA, *data, "--save-interval", "5")
    books = f"case $2 in begin) exit {begins};; end) mkdir {tmp_path}/away && exit 1; exit {ends};; esac"
    done = _run_job(job, tmp_path, {"python": books, "srun": f"exit {runs}", "sleep": "exit 0"})
    assert done.returncode == status, done.stdout
    assert (tmp_path / "scancelled").exists() == bool(begins or ends > 1), "no slice follows where the chain ends"
    done = _run_job(job, tmp_path, {"python": books, "srun": ""}, old_python=0)
    assert done.returncode == 2 and "older than Python 3.9: name another HOST_PYTHON" in done.stdout


@pytest.mark.parametrize(
    ("answer", "minutes"),
    [("exit 1", 365 * 1440), ("echo JobId=1 EndTime=Unknown", 365 * 1440),
     (r"printf 'JobId=1 A=1 EndTime=2099-01-01T00:00:00\nJobId=8 A=1 EndTime=2001-01-01T00:00:00\n'", 10**7)],
    ids=["no answer", "no limit", "an array's last task"],
)  # fmt: skip
def test_a_controller_that_does_not_answer_ends_no_chain(
    answer: str, minutes: int, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_file(tmp_path, f"{CPU_SITE}HOST_PYTHON={tmp_path}/python\n")
    job = text_of("--cluster", str(site), LLAMA, *data, "--save-interval", "5")
    asked = f'case "$*" in *hostnames*) echo n1;; *) {answer};; esac'
    done = _run_job(job, tmp_path, {"python": "", "srun": "", "scontrol": asked}, end="")
    assert done.returncode == 0 and not (tmp_path / "scancelled").exists(), done.stdout
    found = re.search(r"first n1:20001; stops in (\d+) min", done.stdout)
    assert found and 0.9 * minutes < int(found[1]) < 9 * minutes, done.stdout


def test_a_node_without_the_disk_gets_no_further_slice(data: list[str], tmp_path: Path) -> None:
    job = text_of("--cluster", str(site_file(tmp_path, CPU_SITE)), LLAMA, *data, "--save-interval", "5")
    assert "#SBATCH --output=/dev/null\n" in job, "SLURM itself needs no disk to start it"
    for away in (
        job.replace("FOLDER=", f"FOLDER={tmp_path}/none FROM="),
        job.replace('>>"$OUTPUT/', '>>"$OUTPUT/none/'),
    ):
        said = {"squeue": "echo n7", "scontrol": f'echo "$@" >{tmp_path}/said', "sleep": ""}
        assert _run_job(away, tmp_path, said).returncode == 2
        assert (tmp_path / "said").read_text() == "update JobId=1 ExcNodeList=n7,n2\n"
        (tmp_path / "said").unlink()


def _run_job(
    job: str, folder: Path, programs: dict[str, str], end: str = "99999999999", old_python: int = 1
) -> CompletedProcess[str]:
    """Run a job's text with stand-ins for these programs and for SLURM's; its log is in `stdout`."""
    slurms = {"scontrol": "echo NodeAddr=n1", "scancel": f'echo "$@" >>{folder}/scancelled'}
    programs |= {"python": f'[ "$1" != -c ] || exit {old_python}\n{programs["python"]}'} if "python" in programs else {}
    for name, text in {**slurms, **programs}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_END_TIME": end, "SLURMD_NODENAME": "n2"}
    names = ("ARRAY_JOB_ID", "JOB_ID", "JOB_NUM_NODES", "JOB_NODELIST", "NTASKS_PER_NODE", "NTASKS", "NNODES")
    places = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    environ |= {f"SLURM_{name}": "1" for name in names} | places
    (logs := Path(value_of(job, "OUTPUT")[0], "slurm")).mkdir(parents=True, exist_ok=True)
    done = jobs.run(["bash", "-c", job], env={**os.environ, **environ})
    done.stdout = "".join(log.read_text() for log in logs.glob("1_1.log"))
    return done


@pytest.mark.slow
@pytest.mark.megatron
def test_a_flag_that_is_a_note_for_a_container_is_refused_in_it(tmp_path: Path) -> None:
    """The container may have another Megatron than the machine that submits; its own has the last word."""
    site = f"{CPU_SITE}RUNTIME=apptainer\nCONTAINER_IMAGE=/i.sif\nCONTAINER_MOUNTS=/:/\nPYTHON={sys.executable}\n"
    site_file(tmp_path, f"{site}HOST_PYTHON={tmp_path}/python\n")
    words = [LLAMA, "--train-iters", "5", "--save-interval", "5", "--output", str(tmp_path / "run")]
    submitting = ["bash", "launch/slurm/submit.sh", "--cluster", str(tmp_path / "my.env"), "--dry-run", *words]
    refused = "Megatron has no flag --weight-decayy: did you mean --weight-decay?"
    asked = jobs.run([*submitting, "--weight-decayy", "1"], cwd=ROOT, check=True)
    assert f"in a container with this machine's Megatron the run would be refused: {refused}" in asked.stderr
    programs = {
        "python": "[ $3 != watch ] || exec sleep 60",
        "srun": 'while [ $1 != apptainer ]; do shift; done; exec "$@"',
        "apptainer": f'echo "$@" >{tmp_path}/started; while [ $1 != /i.sif ]; do shift; done; shift; exec "$@"',
    }
    done = _run_job(asked.stdout, tmp_path, programs)
    assert done.returncode == 2 and f"error: {refused}\n" in done.stdout, done.stdout
    started = (tmp_path / "started").read_text()
    assert started.startswith(
        f"exec --nv --bind /:/ --pwd {ROOT} /i.sif bash {ROOT}/launch/slurm/rank.sh {ROOT}/{LLAMA} "
    )


def test_rank_sh_gives_torch_its_names(tmp_path: Path) -> None:
    environment = {
        **os.environ, "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NTASKS": "16", "SLURM_NNODES": "2",
        "SLURM_NODEID": "1", "PYTHON": sys.executable,
    }  # fmt: skip
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    limits = "*resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)[0]"
    script = f"import os, resource; print(*(os.environ[name] for name in {names}), {limits})"
    rank = ["bash", str(ROOT / "launch" / "slurm" / "rank.sh"), "-c", script]
    command = ["bash", "-c", f"ulimit -S -n 512; exec {shlex.join(rank)}"]
    done = jobs.run(command, env=environment, check=True)
    *place, files, most, core = done.stdout.split()
    assert place == ["11", "3", "16", "8", "1"], shlex.join(command)
    assert files == most != "512" and core == "0", "as many open files as there may be, and no core"


class TestWhatARunTakes:
    """Printed with every submission and dry run."""

    def disk(self, *argv: str) -> str:
        job, _, plan, _ = submit.prepare(argv, dict(os.environ))
        return submit.disk_of(plan, job)

    def test_checkpoints_of_a_real_size(self, data: list[str]) -> None:
        """14 bytes for each of 6.74 billion weights."""
        says = self.disk(LLAMA, "--model", "7b", *data, "--simreg-lambda", "auto")
        assert re.fullmatch(r"disk +87\.9 GiB a checkpoint, 351\.4 GiB for 3 and one being written; .* are free", says)

    def test_a_checkpoint_has_the_vocabulary_of_its_text(self, data: list[str], tmp_path: Path) -> None:
        """Half of the 32,000 that are assumed: 2 x 4096 x 16,000 x 14 bytes, 1.7 GiB, less."""
        _write_text(tmp_path / "text")
        files = {"text.bin": {"bytes": 4000}}
        (tmp_path / "manifest.json").write_text(json.dumps({"vocab_size": 16_000, "files": files}))
        assert "86.1 GiB a checkpoint" in self.disk(LLAMA, "--model", "7b", *data, "--data", str(tmp_path / "text"))

    @pytest.mark.slow
    @pytest.mark.megatron
    def test_megatrons_estimate_of_the_memory_is_printed(self, tmp_path: Path) -> None:
        """A 7B that is previewed before its text is there."""
        run = [LLAMA, "--model", "7b", "--recipe", "paper", "--data", "PREFIX", "--tokenizer", "PATH"]
        run += ["--output", str(tmp_path / "run"), "--micro-batch-size", "16"]

        def submitted(*words: str) -> tuple[int, str]:
            done = jobs.run(["bash", str(ROOT / "launch/slurm/submit.sh"), "--dry-run", *words], cwd=ROOT)
            return done.returncode, done.stderr

        status, said = submitted(*run)
        estimate = "by Megatron's estimate (38.2 of weights and optimizer and 145.2 of activations)"
        assert status == 0 and f"\n> memory    183.5 GiB of a GPU's 80, {estimate}" in said, said
        assert "the run itself would be refused on this machine: there is no PREFIX.bin" in said
        site = site_file(tmp_path, f"{DEFAULT.read_text()}\nGPU_MEMORY=192\n")
        assert "183.5 GiB of a GPU's 192" in submitted("--cluster", str(site), *run)[1]
