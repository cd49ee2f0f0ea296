# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.ledger [--write]`: where every measured number of the README and the guides comes from.

To enter one: the page, its text with {} in the place of each number, the file that the numbers follow from with the
command that makes it, and the numbers, computed from the file. What must be entered, and what is compared, is in
benchmarks/figures.py. After a new measurement `--write` puts the files' numbers into the pages, each as precise as the
one that it replaces; the words around them are yours to read again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections.abc import Iterable
from functools import cache, partial
from statistics import mean, median
from typing import Any

from scipy import stats

from benchmarks import claims
from benchmarks.figures import ROOT, Entry, Figure, Ledger, Made, NotMeasured, Source, complaints, write
from benchmarks.step_pairs import windows_of
from simreg_megatron.report.steps import overhead
from simreg_megatron.report.welch import deviation, ratio, welch
from simreg_megatron.reproduce import conclusion, verdict
from simreg_megatron.reproduce.check import read_tables
from simreg_megatron.reproduce.pace import pace
from tests.stress import judge

PAGES = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/checkpoints.md", "docs/cluster.md",
    "docs/data.md", "docs/design.md", "docs/ecosystem.md", "docs/evaluation.md", "docs/evidence.md", "docs/exact.md",
    "docs/existing-pipeline.md", "docs/first-hour.md", "docs/hugging-face.md", "docs/objectives.md",
    "docs/performance.md", "docs/reliability.md", "docs/scale.md", "docs/sharp-edges.md", "docs/support.md",
    "patches/README.md",
)  # fmt: skip
MADE_PAGES = {
    "docs/parity.md": "python -m tests.megatron.parity", "docs/versions.md": "python -m tests.versions",
    "docs/flags.md": "simreg-megatron flags --markdown",
}  # fmt: skip
"""Pages that a command writes from beginning to end, and that say so."""

CPU = Source("benchmarks/results/cpu.csv", "make bench BENCH_ARGS='--device cpu --output benchmarks/results'")
PAIRS = Source("benchmarks/results/step_pairs.csv", "python -m benchmarks.step_pairs")
DEMO = Source("benchmarks/results/demo.json", "make demo && cp runs/demo/result.json benchmarks/results/demo.json")
PREFIXES = Source("benchmarks/results/prefixes.csv", "python -m benchmarks.prefixes")
SIGMOID = Source("benchmarks/results/sigmoid_synthetic.md", "python -m benchmarks.sigmoid_synthetic")


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def json_of(file: str) -> Any:
    return json.loads(text_of(file))


@cache
def csv_of(file: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text_of(file).splitlines()))


def column(source: Source, name: str, **where: object) -> list[float]:
    """The numbers of a column, of those rows of the CSV that have these values; empty cells are left out."""
    rows = [row for row in csv_of(source.file) if all(row[key] == str(value) for key, value in where.items())]
    return [float(row[name]) for row in rows if row[name]]


def one(source: Source, name: str, **where: object) -> float:
    (found,) = column(source, name, **where)
    return found


def states(page: str, text: str, file: str, pattern: str, times: float = 1, check: str = "make test") -> Figure:
    """Numbers that stand in the code as the groups of `pattern`: a bound that a test asserts, a size that is kept."""

    def values() -> Iterable[float]:
        (groups,) = {match.groups() for match in re.finditer(pattern, text_of(file))}
        return [times * float(group) for group in groups]

    return Figure(page, text, Source(file, check), values)


# ---- the forms of the loss, measured on a CPU ----------------------------------------------------------------------


def loss_on_cpu(name: str, loss: str, tokens: int, width: int = 512) -> float:
    return one(CPU, name, loss=loss, tokens=tokens, width=width, **{"pass": "forward+backward"})


def over_tiled(loss: str, name: str = "seconds", *, tokens: int = 512) -> list[float]:
    """Of every size with so many tokens or more, the form's `name` over that of the tiled form."""
    found = csv_of(CPU.file)
    sizes = {(int(row["tokens"]), int(row["width"])) for row in found if int(row["tokens"]) >= tokens}
    return [loss_on_cpu(name, loss, *size) / loss_on_cpu(name, "tiled", *size) for size in sorted(sizes)]


def tiled_errors() -> list[float]:
    rows = [row for row in csv_of(CPU.file) if row["loss"] == "tiled" and int(row["tokens"]) >= 512]
    return [max(float(row[name]) for row in rows if row[name]) for name in ("loss_error", "gradient_error")]


def memory_of_8192() -> list[float]:
    """MiB of the reference and of the tiled form, their ratio, MiB of the gradient, MiB of the tiled form again."""
    reference, tiled = (loss_on_cpu("extra_bytes", loss, 8192) for loss in ("reference", "tiled"))
    return [reference / 2**20, tiled / 2**20, reference / tiled, 8192 * 512 * 4 / 2**20, tiled / 2**20]


MEMORY = Source("benchmarks/results/memory.csv", "python -m benchmarks.memory --measure")
WEIGHTS = Source("benchmarks/results/bf16_weights.csv", "python -m benchmarks.bf16_weights")
PERFORMANCE = "docs/performance.md"
OF_THE_LOSS = (
    Figure(PERFORMANCE, "as far as the table goes | 3e-4 | {} at most", WEIGHTS,
           lambda: [max(column(WEIGHTS, "error", rows="bfloat16"))]),
    Figure(PERFORMANCE, "up to 131,072 tokens | 256 MiB, better 64 | at most {} MiB, counted", MEMORY,
           lambda: [max(column(MEMORY, "counted_mib", device="cuda"))]),
    Figure(PERFORMANCE, "of the reference over tiled | 2.5, better 4 | {} |", CPU,
           lambda: [loss_on_cpu("seconds", "reference", 8192) / loss_on_cpu("seconds", "tiled", 8192)]),
    Figure(PERFORMANCE, "reference over tiled | 20 | {} MiB over {} MiB: {} ({} of the {} are the gradient)", CPU,
           memory_of_8192),
    Figure(PERFORMANCE, "at widths 512 and 1024, the same | | {} to {} times faster", CPU,
           lambda: [min(over_tiled("reference")), max(over_tiled("reference"))]),
    Figure(PERFORMANCE, "2048 tokens and more | | {} to {} times the time, up to {} times the memory", CPU,
           lambda: [min(over_tiled("compiled", tokens=2048)), max(over_tiled("compiled", tokens=2048)),
                    max(over_tiled("compiled", "extra_bytes", tokens=2048))]),
    Figure(PERFORMANCE, "over tiled, 8192 tokens, width 512 | | {} times the time", CPU,
           lambda: [loss_on_cpu("seconds", "SupConLoss", 8192) / loss_on_cpu("seconds", "tiled", 8192)]),
    Figure(PERFORMANCE, "float64, fp32 rows | 1e-5; 3e-4 | {} and {} at most from 512 tokens on", CPU, tiled_errors),
    Figure(PERFORMANCE, "The reference keeps {} bytes a pair", CPU,
           lambda: [loss_on_cpu("extra_bytes", "reference", 8192) / 8192**2]),
)  # fmt: skip


def over_plain() -> list[float]:
    lines = [line for line in csv_of(PAIRS.file) if line["kind"] == "SimReg, chunks"]
    found = overhead(*windows_of(lines, "processor_seconds", True))
    return [found.percent, found.low, found.high]


H200 = "benchmarks/results/gpu/h200"
H200_PAIRS = Source(f"{H200}/pairs.csv", "make gpu GPU_ARGS='--calls b --only pairs-350m'")
H200_FORMS = Source(f"{H200}/forms.csv", "make gpu GPU_ARGS='--calls b --only forms'")
H200_TESTS = Source(f"{H200}/tests.csv", "make gpu GPU_ARGS='--calls a --only tests'")
H200_RUN = Source(f"{H200}/350m.csv", H200_PAIRS.command)
H200_TRIALS = Source(f"{H200}/trials.csv", "simreg-megatron doctor --gpu")


def over_plain_on_h200() -> list[float]:
    """ms of a plain step, and percent with SimReg, with the interval; of steps without a log line."""
    found = overhead(*windows_of(csv_of(H200_PAIRS.file), "seconds", False))
    return [found.base, found.percent, found.low, found.high]


def form_on_h200(name: str, size: str = "32 x 1024 x 1024") -> list[float]:
    """ms of the triton form, and of 1.5 products of all pairs."""
    where = {"form": "triton", "size": size, "dtype": "bfloat16"}
    batch, length, width = map(int, size.split(" x "))
    products = 1.5 * 2 * batch * length**2 * width / (one(H200_FORMS, "peak_tflops", **where) * 1e9)
    return [one(H200_FORMS, name, **where), products]


def memory_on_h200() -> list[float]:
    """MiB of a fast form next to rows and gradient, at most."""
    found = []
    for row in csv_of(H200_FORMS.file):
        if row["form"] != "reference":
            gradient = math.prod(map(int, row["size"].split(" x "))) * (4 if row["dtype"] == "float32" else 2)
            found.append((int(row["extra_bytes"]) - gradient) / 2**20)
    return [max(found)]


def least_of_the_host() -> list[float]:
    """ms of a call with its backward, where the device takes less than half of it."""
    return [min(float(row["both_ms"]) for row in csv_of(H200_FORMS.file)
                if row["replay_ms"] and float(row["both_ms"]) > 2 * float(row["replay_ms"]))]  # fmt: skip


def tests_on_h200(result: str, of: str) -> int:
    return sum(row["result"] == result and of in row["command"] + row["test"] for row in csv_of(H200_TESTS.file))


OF_H200 = (
    Figure("README.md", "and a step of 350M took {} % longer", H200_PAIRS, lambda: over_plain_on_h200()[1:2]),
    Figure(PERFORMANCE, "of 350M took {} % longer", H200_PAIRS, lambda: over_plain_on_h200()[1:2]),
    Figure(PERFORMANCE, "over plain Megatron | 1 % | **{} %** (interval {} to {})", H200_PAIRS,
           lambda: over_plain_on_h200()[1:]),
    Figure(PERFORMANCE, "A plain step took {} ms, and one with SimReg {} % more", H200_PAIRS,
           lambda: over_plain_on_h200()[:2]),
    Figure(PERFORMANCE,
           "time on the device | | {} ms (triton); 1.5 products of all pairs at the rate of a large one take {} ms",
           H200_FORMS, lambda: form_on_h200("replay_ms")),
    Figure(PERFORMANCE, "The device computes SimReg in {} ms", H200_FORMS, lambda: form_on_h200("replay_ms")[:1]),
    Figure(PERFORMANCE, "call by call, with the host | | {} ms", H200_FORMS, lambda: form_on_h200("both_ms")[:1]),
    Figure(PERFORMANCE, "width 512 | | {} ms (triton); 1.5 products: {} ms", H200_FORMS,
           lambda: form_on_h200("both_ms", "1 x 131072 x 512")),
    Figure(PERFORMANCE, "call of any form takes the host {} ms or more", H200_FORMS, least_of_the_host),
    Figure(PERFORMANCE, "up to 131,072 tokens | 256 MiB, better 64 | at most {} MiB |", H200_FORMS, memory_on_h200),
    Figure(PERFORMANCE, "test_forms.py {} tests passed for each of gemm, triton and tiled, and {} each were skipped",
           H200_TESTS, lambda: [tests_on_h200("pass", "-gemm]") + tests_on_h200("pass", "[gemm]") - 2,
                                tests_on_h200("skip", "-gemm]")]),
    Figure(PERFORMANCE, "test_one_gpu.py {} passed", H200_TESTS, lambda: [tests_on_h200("pass", "test_one_gpu")]),
    Figure(PERFORMANCE, "loss of 350M went from {} to {}.", H200_RUN,
           lambda: [column(H200_RUN, "lm_loss")[0], column(H200_RUN, "lm_loss")[-1]]),
    Figure(PERFORMANCE, "losses off by at most {}, and gradients by {}, with their rounding", H200_TRIALS,
           lambda: [max(column(H200_TRIALS, "loss_error")), max(column(H200_TRIALS, "gradient_error"))]),
    NotMeasured("README.md", "aims, and how long it ran",
                ("h200), for 15 minutes", "longer (aim: 1 %)")),
    NotMeasured("CHANGELOG.md", "how long it ran", ("once, for 15 minutes",)),
    NotMeasured("docs/sharp-edges.md", "how long it ran", ("once, for 15 minutes",)),
    NotMeasured(PERFORMANCE, "what the code allows, and this benchmark at another commit",
                ("(at most 48 MiB) stay",
                 "nothing: 1.24 ms and 425 calls of package functions (gemm) at commit 84e5864")),
    NotMeasured(PERFORMANCE, "aims, and how long it ran",
                ("2026-11-26, for 15 minutes", "% more, not 1 %", "over plain Megatron | 1 % |",
                 "any of it on an H800 | 0.5 %, 0.2 % |")),
)  # fmt: skip


OF_THE_STEP = (
    Figure(PERFORMANCE, "better 2 | {} % more processor time (interval {} to {};", PAIRS, over_plain),
    Figure("docs/evidence.md", "inside one run show {} % for the tiny model", PAIRS, lambda: over_plain()[:1]),
)


# ---- large layouts -------------------------------------------------------------------------------------------------

SCALE = Source("benchmarks/results/scale.csv", "python -m benchmarks.scale")


def of_scale(layout: str, tokens: int, chunk: int | str, *, width: int = 8192) -> list[float]:
    """MiB received and MiB of memory."""
    where = {"layout": layout, "batch": 1, "tokens": tokens, "width": width, "chunk": chunk}
    return [one(SCALE, "bytes_received", **where) / 2**20, one(SCALE, "memory_mib", **where)]


def of_longest(chunk: int | str) -> list[float]:
    return of_scale("TP8 SP x CP8", 131072, chunk)


PAGE_OF_SCALE = "docs/scale.md"
OF_SCALE = (
    Figure(PAGE_OF_SCALE, "width 4096, TP8 SP: {} MiB received and {} MiB of memory", SCALE,
           lambda: of_scale("TP8 SP", 8192, "whole", width=4096)),
    Figure(PAGE_OF_SCALE, "width 8192, TP8 SP: {} MiB received and {} MiB.", SCALE,
           lambda: of_scale("TP8 SP", 32768, "whole")),
    Figure(PAGE_OF_SCALE, "TP8 SP x CP8: {} MiB received and {} MiB. Do not.", SCALE, lambda: of_longest("whole")),
    Figure(PAGE_OF_SCALE, "Chunks of 8192 tokens receive {} MiB and take {} MiB; with chunks of 1024 nothing is sent, "
           "at {} MiB", SCALE, lambda: [*of_longest(8192), of_longest(1024)[1]]),
    Figure(PAGE_OF_SCALE, "TP8 alone takes {} MiB with chunks of 1024, and TP8 SP {} MiB", SCALE,
           lambda: [of_scale(layout, 131072, 1024)[1] for layout in ("TP8", "TP8 SP")]),
)  # fmt: skip


# ---- the demo ------------------------------------------------------------------------------------------------------


def of_demo(run: str, *names: str) -> list[float]:
    return [json_of(DEMO.file)["runs"][run][name] for name in names]


def demo_difference(*names: str) -> list[float]:
    pairs = zip(of_demo("simreg", *names), of_demo("cross-entropy", *names), strict=True)
    return [ours - plain for ours, plain in pairs]


COLUMNS = ("validation_loss", "simreg_loss", "mean_cosine")
ROW = " ".join("{}" for _ in COLUMNS)
OF_THE_DEMO = (
    Figure("README.md", "({} s after the set-up;", DEMO, lambda: [json_of(DEMO.file)["seconds"]]),
    Figure("README.md", f"cosine of other labels cross-entropy {ROW} simreg {ROW} difference {ROW}", DEMO,
           lambda: [*of_demo("cross-entropy", *COLUMNS), *of_demo("simreg", *COLUMNS), *demo_difference(*COLUMNS)]),
)  # fmt: skip


# ---- objectives ----------------------------------------------------------------------------------------------------


def margins() -> list[tuple[float, float, float]]:
    """(b, the source's margin, ours) of the table of a fixed bias."""
    table = text_of(SIGMOID.file).split("## Relative bias fixed")[1].split("\n## ")[0]
    return [tuple(map(float, row)) for row in re.findall(r"^\| (-?[\d.]+) \| ([\d.]+) \| (-?[\d.]+) \|", table, re.M)]


def gains_of_three_seeds() -> list[float]:
    """Smallest and largest difference in validation loss, each between two runs of one seed."""
    by_run = {name: column(PREFIXES, "validation_loss", run=name) for name in ("cross-entropy alone", "SimReg")}
    gains = [plain - ours for plain, ours in zip(*by_run.values(), strict=True)]
    assert len(gains) == 3
    return [min(gains), max(gains)]


def margins_of_modalities() -> list[float]:
    """How far each is from the source's."""
    section = text_of(SIGMOID.file).split("## More modalities")[1].split("\n## ")[0]
    return [
        abs(float(theirs) - float(ours))
        for theirs, ours in re.findall(r"modalities \| ([\d.]+) \| ([\d.]+) \|", section)
    ]


def runs_of(experiment: str, folder: str = "evidence", *, size: int | str = 64) -> Source:
    made_by = f"simreg-megatron reproduce {experiment} --sizes {size}"
    return Source(f"benchmarks/results/{folder}/{experiment}.csv", made_by)


SEARCH = runs_of("tuning")


def millions_of_tokens(size: int = 64) -> list[float]:
    return [column(SEARCH, "tokens", size=size)[0] / 1e6]


def gain_of_the_search(size: int) -> list[float]:
    """Nats per token between the best run of cross-entropy and the best of SimReg."""
    best = [min(column(SEARCH, "validation_loss", arm=arm, size=size)) for arm in ("cross-entropy", "simreg")]
    return [best[0] - best[1]]


EDGE = runs_of("edge")


def ends_at_the_edge(arm: str) -> list[float]:
    """The lowest and the highest validation loss of an arm."""
    found = column(EDGE, "validation_loss", arm=arm)
    return [min(found), max(found)]


NOISE = runs_of("noise")


def noise() -> list[float]:
    """The lowest and the highest end of ten seeds of the baseline, their deviation, and that of the five first."""
    ends = column(NOISE, "validation_loss")
    first = [end for end, seed in zip(ends, column(NOISE, "seed"), strict=True) if seed <= 5]
    return [min(ends), max(ends), deviation(ends), deviation(first)]


def scatter_of_the_horizon() -> list[float]:
    """Deviations from seed to seed: of SimReg after 20, 40 and 80 tokens a parameter, then of cross-entropy."""
    lengths = ("20", "40", "80")
    return [
        deviation(column(runs_of("horizon"), "validation_loss", arm=arm, tokens_per_parameter=length))
        for arm in ("simreg-chunk", "cross-entropy")
        for length in lengths
    ]


def judged_at(size: int | str, experiment: str) -> list[verdict.Verdict]:
    """The verdicts on an experiment's claims at a size, in their order."""
    table = read_tables(claims.FOLDER)[experiment]
    return [found for found in verdict.judge(table.plan, table.rows) if found.place.size == f"{size}"]


def p_value_at(size: int, claim: int) -> list[float]:
    return [judged_at(size, "convergence")[claim].p_value]


def lead_half_way() -> list[float]:
    """By how much SimReg's training loss is lower at width 96, in the middle tenth of the training."""
    rows = {row["run"]: row for row in csv_of(runs_of("convergence").file) if row["size"] == "96"}
    found: dict[str, list[float]] = {"cross-entropy": [], "simreg-chunk": [], "simreg-whole": []}
    for point in csv_of("benchmarks/results/evidence/convergence-curves.csv"):
        row = rows.get(point["run"])
        if row and point["tag"] == "train_loss" and 0.45 < int(point["step"]) / int(row["steps"]) <= 0.55:
            found[row["arm"]].append(float(point["value"]))
    return [mean(found["cross-entropy"]) - mean(found["simreg-chunk"])]


def means_of_inner_layers() -> list[float]:
    return [mean(column(runs_of("layers"), "validation_loss", arm=f"layer-{layer}")) for layer in (1, 2, 3)]


def means_of_the_sweep() -> list[float]:
    """The lowest and the highest mean of the arms with lambda to 3 and temperatures to 0.05, and the baseline's."""
    sweep = runs_of("sweep")
    flat = ("lambda-0.1", "lambda-0.3", "lambda-1", "lambda-3", "tau-0.005", "tau-0.02", "tau-0.05")
    means = [mean(column(sweep, "validation_loss", arm=arm, size=64)) for arm in flat]
    return [min(means), max(means), mean(column(sweep, "validation_loss", arm="cross-entropy", size=64))]


def against_all_seeds(experiment: str, arm: str) -> list[float]:
    """The size of the difference and of the ends of its interval, the nearer end first."""
    return apart(ends(experiment, arm), column(NOISE, "validation_loss"))


def p_values_of_labels() -> list[float]:
    return [found.p_value for found in judged_at(64, "labels")[:2]]


def ends(experiment: str, arm: str, metric: str = "validation_loss", size: int = 64) -> list[float]:
    """Of an arm's runs, in the order of their seeds."""
    rows = [row for row in csv_of(runs_of(experiment).file) if (row["arm"], row["size"]) == (arm, f"{size}")]
    return [float(row[metric]) for row in sorted(rows, key=lambda row: int(row["seed"]))]


def apart(arm: list[float], than: list[float], *, paired: bool = False) -> list[float]:
    """The size of the difference of two arms, and the ends of its 95 % interval: after Welch, or seed by seed."""
    if not paired:
        found = welch(arm, than)
        return _nearer_first(found.difference, found.low, found.high)
    each = [one - other for one, other in zip(arm, than, strict=True)]
    low, high = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    return _nearer_first(mean(each), low, high)


def _nearer_first(difference: float, low: float, high: float) -> list[float]:
    sign = math.copysign(1, difference)
    return [sign * difference, *sorted((sign * low, sign * high))]


def share_of_the_placebo(kind: str) -> list[float]:
    """Percent of SimReg's gain over cross-entropy, and its interval."""
    arms = (f"placebo-{kind}", "cross-entropy", f"simreg-{kind}")
    found, interval = ratio(*(ends("labels", arm) for arm in arms))
    assert interval is not None
    return [100 * share for share in (found, *interval)]


def together() -> list[float]:
    """Numbers of tests, of those that held, and of those that are decided when their number counts."""
    found = claims.together(read_tables(claims.FOLDER))
    return [len(found.tests), found.held, found.left]


def saved(experiment: str, claim: int, size: int = 64) -> list[float]:
    """Percent of the tokens, and the ends of the interval."""
    tables = read_tables(claims.FOLDER)
    judged = [found for found in conclusion.verdicts_on(experiment, tables) if found.place.size == f"{size}"]
    worth = judged[claim].worth
    assert worth is not None and worth.interval is not None
    return [100 * share for share in (worth.tokens, *worth.interval)]


def flags_of(arm: str, *names: str, size: int = 64) -> list[float]:
    """What these flags of an arm's runs were."""
    rows = csv_of(runs_of("convergence").file)
    words = next(row["flags"].split() for row in rows if (row["arm"], row["size"]) == (arm, f"{size}"))
    return [float(words[words.index(f"--{name}") + 1]) for name in names]


def size_of(found: verdict.Verdict) -> list[float]:
    """Of the difference, and of the ends of its interval in the same direction."""
    return _nearer_first(found.difference, *found.interval)


def decided(page: str, sentence: str, experiment: str, *places: int, numbers: int = 3, size: int | str = 64) -> Figure:
    """Of each of these verdicts at a size, the size of the difference and of the ends of its interval, the nearer end
    first."""

    def values() -> list[float]:
        judged = judged_at(size, experiment)
        return [number for place in places for number in size_of(judged[place])[:numbers]]

    return Figure(page, sentence, runs_of(experiment, size=size), values)


def seconds_against_plain(arm: str) -> list[float]:
    """Percent that a step takes longer than one of Megatron alone, and the ends of the interval."""
    table = read_tables(claims.FOLDER)["runtime"]
    found = pace(table.rows, arm, "megatron", verdict.Place("64", "2"), table.rows)
    assert found is not None
    return [100 * (times - 1) for times in found]


TINY = Source("benchmarks/results/reproduce_tiny.txt", "simreg-megatron reproduce convergence --model tiny --seeds 3")


def hours_of_tiny() -> list[float]:
    """What it said beforehand, and from its first line of progress to its last."""
    said = text_of(TINY.file)
    clock = [60 * int(hour) + int(minute) for hour, minute in re.findall(r"(?m)^(\d\d):(\d\d)  \d of 9 runs", said)]
    (told,) = re.findall(r"about ([\d.]+) hours here", said)
    return [float(told), (clock[-1] - clock[0]) / 60]


def of_tiny(pattern: str) -> list[float]:
    return [abs(float(found)) for found in re.findall(pattern, text_of(TINY.file))[:1]]


OBJECTIVES = "docs/objectives.md"
OF_OBJECTIVES = (
    Figure("docs/evidence.md", 'said "about {} hours" and took {}, on two cores', TINY, hours_of_tiny),
    Figure("docs/evidence.md", "SimReg in chunks ended {} lower there, and", TINY,
           partial(of_tiny, r"less that of cross-entropy: (-[\d.]+) nats")),
    Figure("docs/evidence.md", "seeds have a standard deviation of {}. `--dry-run`", TINY,
           partial(of_tiny, r"with a standard deviation of ([\d.]+) nats")),
    Figure("README.md", "width 64, {} million tokens", SEARCH, millions_of_tokens),
    decided("README.md", "4.0 million tokens | {} lower |", "convergence", 0, numbers=1),
    decided("README.md", "4.0 million tokens | 0.099 lower | {} lower |", "fewer", 0, numbers=1),
    decided("README.md", "lower | 0.025 lower | {} **higher** |", "saving", 0, numbers=1),
    decided("README.md", "cross-entropy ends {} lower; SimReg", "initialisation", 0, numbers=1, size=32),
    decided("README.md", "preset's ends {} lower than that", "initialisation", 2, numbers=1, size=32),
    decided("README.md", "permuted labels, ends {} lower at", "labels", 2, numbers=1),
    Figure("README.md", "width 32, {} million tokens", SEARCH, partial(millions_of_tokens, 32)),
    decided("README.md", "1.1 million tokens | {} lower |", "convergence", 0, numbers=1, size=32),
    decided("README.md", "lower | not run | {} lower |", "saving", 0, numbers=1, size=32),
    Figure("docs/evidence.md", "beside the embeddings,\n{} million tokens) was", SEARCH,
           partial(millions_of_tokens, 32)),
    Figure("docs/evidence.md", "gave cross-entropy\na rate of {} and a weight decay of {}, both",
           runs_of("convergence"), partial(flags_of, "cross-entropy", "lr", "weight-decay", size=32)),
    Figure("docs/evidence.md", "and SimReg\na rate of {} and lambda {}, the lowest", runs_of("convergence"),
           partial(flags_of, "simreg-chunk", "lr", "simreg-lambda", size=32)),
    decided("docs/evidence.md", "seeds of each SimReg in\nchunks ends {} lower ({} to {})", "convergence", 0, size=32),
    decided("docs/evidence.md", "on whole sequences\n{} lower ({} to {}), and", "convergence", 1, size=32),
    decided("docs/evidence.md", "whole sequences there, by\n{} ({} to {})", "convergence", 2, size=32),
    decided("docs/evidence.md", "it ends still {} lower\n({} to {}) than the baseline", "saving", 0, size=32),
    decided("docs/evidence.md", "| all tokens | {} lower ({} to {}) |", "convergence", 0),
    decided("docs/evidence.md", "90 % of the tokens | {} lower ({} to {}) |", "fewer", 1),
    decided("docs/evidence.md", "80 % of the tokens | {} lower ({} to {}) |", "fewer", 0),
    decided("docs/evidence.md", "70 % of the tokens | {} higher ({} to {}) |", "saving", 0),
    decided("docs/evidence.md", "on whole sequences SimReg ends {} lower with all tokens ({} to {})", "convergence", 1),
    decided("docs/evidence.md", "tokens for both, SimReg ends {}\nlower ({} to {})", "saving", 1),
    decided("docs/evidence.md", "the placebo, than cross-entropy | {} lower ({} to {}) | {} lower ({} to {}) |",
            "labels", 2, 3),
    decided("docs/evidence.md", "SimReg, than the placebo | {} lower ({} to {}) | {} lower ({} to {}) |",
            "labels", 0, 1),
    Figure("docs/evidence.md", "one-sided, p {} and {},", runs_of("labels"), p_values_of_labels),
    decided("docs/evidence.md", "SimReg ends {} lower ({} to {}) than cross-entropy with twice", "controls", 1),
    decided("docs/evidence.md", "output layer, {} lower ({} to {}) than four", "controls", 2),
    decided("docs/evidence.md", "and {} lower ({} to {}) than a z-loss", "controls", 3),
    decided("docs/evidence.md", "it\nends {} lower ({} to {}) than at a rate of 0.008", "shortened", 0),
    decided("docs/evidence.md", "and {} lower ({} to {}) than at\n0.004", "shortened", 1),
    decided("docs/evidence.md", "SimReg in chunks ends {}\nlower ({} to {}) than CReg", "baselines", 2),
    decided("docs/evidence.md", "CReg, {} lower ({} to {}) than CPretrain", "baselines", 1),
    decided("docs/evidence.md", "CPretrain, {} lower ({} to {}) than SCE", "baselines", 3),
    decided("docs/evidence.md", "SCE and\n{} lower ({} to {}) than SimCSE", "baselines", 0),
    decided("docs/evidence.md", "SimReg ends {} lower ({} to\n{}) than cross-entropy, ", "horizon", 0),
    decided("docs/evidence.md", "{} lower ({} to {}) with twice the tokens, and", "horizon", 1),
    decided("docs/evidence.md", "and {} lower ({} to {}) with four\ntimes the tokens", "horizon", 2),
    decided("docs/evidence.md", "the demo's text, ends {} lower\n({} to {}) with SimReg (`moe`", "moe", 0, size="tiny"),
    decided("docs/evidence.md", "cross-entropy ends\n{} lower ({} to {}), and", "clipping", 0),
    decided("docs/evidence.md", "SimReg {} lower ({} to {}; `clipping`", "clipping", 1),
    decided("docs/evidence.md", "states SimReg ends {} higher\n({} to {}) than on the final", "layers", 0),
    Figure("docs/evidence.md", "and third layer are {}, {} and {}, and", runs_of("layers"), means_of_inner_layers),
    Figure("docs/evidence.md", "end between {} and {} (`sweep`; cross-entropy:\n{})", runs_of("sweep"),
           means_of_the_sweep),
    decided("docs/evidence.md", "0.1 ends {} higher ({} to\n{}) than 0.01", "sweep", 0),
    decided("docs/evidence.md", "width of 1024, {} higher ({} to {}) than lambda 1", "sweep", 1),
    Figure("docs/evidence.md", "the best of these is {} higher ({} to\n{})", runs_of("layers"),
           lambda: apart(ends("layers", "layer-3"), column(NOISE, "validation_loss"))),
    Figure("docs/evidence.md", "they differ by up to {}, a third", runs_of("sweep"),
           lambda: [means_of_the_sweep()[1] - means_of_the_sweep()[0]]),
    Figure("docs/evidence.md", "asks for 1.77), but ends {} higher ({} to {}) than lambda 0.3", runs_of("scaling"),
           lambda: apart(ends("scaling", "lambda-auto", size=32), ends("scaling", "lambda-0.3", size=32))),
    Figure("docs/evidence.md", "and\n{} higher ({} to {}) than lambda 1.", runs_of("scaling"),
           lambda: apart(ends("scaling", "lambda-auto", size=32), ends("scaling", "lambda-1", size=32))),
    Figure("docs/evidence.md", "throughout ends {} higher ({} to\n{}) than in the first half", runs_of("schedule"),
           lambda: apart(ends("schedule", "constant"), ends("schedule", "off-50"), paired=True)),
    Figure("docs/evidence.md", "half, and {} higher ({} to\n{}) than in the first quarter", runs_of("schedule"),
           lambda: apart(ends("schedule", "constant"), ends("schedule", "off-25"), paired=True)),
    decided("docs/evidence.md", "is not shown: their mean is {} higher ({} to {}; `controls`)", "controls", 5),
    Figure("docs/evidence.md", "which itself ends {} lower ({} to {}) than cross-entropy", runs_of("controls"),
           lambda: apart(ends("controls", "z-loss"), ends("controls", "measuring"))),
    Figure("docs/evidence.md", "and CReg ends {} lower ({} to {}) than cross-entropy already", runs_of("baselines"),
           lambda: apart(ends("baselines", "creg"), ends("baselines", "cross-entropy"))),
    Figure("docs/evidence.md", "with SimReg the standard deviations are {}, {} and {}, without it {}, {} and {}",
           runs_of("horizon"), scatter_of_the_horizon),
    Figure("README.md", "{} % of the gain (95 % interval {} to {}) comes", runs_of("labels"),
           partial(share_of_the_placebo, "chunk")),
    Figure("docs/evidence.md", "So {} % of the gain (95 % interval {} to {}) come", runs_of("labels"),
           partial(share_of_the_placebo, "chunk")),
    Figure("docs/evidence.md", "chunks, and {} % ({} to {}) on whole", runs_of("labels"),
           partial(share_of_the_placebo, "whole")),
    Figure("docs/evidence.md", "between {} % of the tokens ({} to {}; from", runs_of("fewer"),
           partial(saved, "fewer", 0)),
    Figure("docs/evidence.md", "a lower bound) and {} % ({} to {}; from", runs_of("saving"),
           partial(saved, "saving", 0)),
    Figure("docs/evidence.md", "Of the {} tests {} held; corrected for their number (Holm, two-sided), {} are decided",
           runs_of("convergence"), together),
    Figure("docs/evidence.md", "standard deviation of {}, where SimReg's have {}, and", runs_of("convergence"),
           lambda: [deviation(ends("convergence", arm, size=32)) for arm in ("cross-entropy", "simreg-chunk")]),
    Figure("docs/evidence.md", "end at\n{} on average where the search had picked {};", runs_of("convergence"),
           lambda: [mean(ends("convergence", "cross-entropy", size=32)),
                    min(column(SEARCH, "validation_loss", arm="cross-entropy", size=32))]),
    Figure("docs/evidence.md", "shortened runs have a standard deviation of {}", runs_of("saving"),
           lambda: [deviation(ends("saving", "cross-entropy-70", size=32))]),
    decided("docs/evidence.md", "it still ends {} lower ({} to\n{}) than cross-entropy", "schedule", 1),
    decided("docs/evidence.md", "shown ({} higher, {} to {})", "schedule", 0),
    decided("docs/evidence.md", "twice the tokens it is {} lower ({} to\n{})", "plateau", 0),
    decided("docs/evidence.md", "lowers it by {} more ({} to {};", "plateau", 1),
    Figure("docs/evidence.md", "trained on {} million tokens", SEARCH, millions_of_tokens),
    Figure("docs/evidence.md", "learning rate of {} and\na weight decay of {}", runs_of("convergence"),
           partial(flags_of, "cross-entropy", "lr", "weight-decay")),
    Figure("docs/evidence.md", "tokens, a rate of {} and lambda 1.", runs_of("convergence"),
           partial(flags_of, "simreg-chunk", "lr")),
    decided("docs/evidence.md", "2.5 at this width, ends\n{} lower ({} to {}) than cross-entropy", "scaling", 0),
    Figure("docs/evidence.md", "by {} % ({} to {}) with SimReg in chunks", runs_of("runtime"),
           partial(seconds_against_plain, "simreg-chunk")),
    Figure("docs/evidence.md", "by {} %\n({} to {}) on whole sequences", runs_of("runtime"),
           partial(seconds_against_plain, "simreg-whole")),
    decided("docs/evidence.md", "isotropy, by {} ({} to {})", "similarity", 2),
    decided("docs/evidence.md", "labels falls, by {} ({} to {})", "similarity", 1),
    Figure("docs/existing-pipeline.md", "(to {} instead of {} at", runs_of("similarity"),
           lambda: [mean(column(runs_of("similarity"), "simreg_loss", arm=a)) for a in ("simreg", "cross-entropy")]),
    Figure("docs/evidence.md", "all ten end between {} and {}, with a\nstandard deviation of {} where it was {}.",
           NOISE, noise),
    Figure("docs/evidence.md", "these ten SimReg in chunks ends {} lower ({} to {})", NOISE,
           partial(against_all_seeds, "convergence", "simreg-chunk")),
    Figure("docs/evidence.md", "and with 80 %\nof the tokens {} lower ({} to {})", NOISE,
           partial(against_all_seeds, "fewer", "simreg-80")),
    Figure("docs/evidence.md", "not tuned: {} to {} nats per token in three seeds", PREFIXES, gains_of_three_seeds),
    Figure("docs/evidence.md", "ended\nbetween {} and {}, and at the rate", EDGE,
           partial(ends_at_the_edge, "cross-entropy-above")),
    Figure("docs/evidence.md", "rate of the search between {} and {}.", EDGE,
           partial(ends_at_the_edge, "cross-entropy")),
    decided("docs/evidence.md", "SimReg in chunks ends {} lower ({} to {}, p", "convergence", 0, size=96),
    decided("docs/evidence.md", "on whole sequences {} lower ({} to {}, p", "convergence", 1, size=96),
    Figure("docs/evidence.md", "p {}) than cross-entropy with all tokens, and", runs_of("convergence"),
           partial(p_value_at, 96, 0)),
    Figure("docs/evidence.md", ", p {}). With 70 % of the tokens it ends", runs_of("convergence"),
           partial(p_value_at, 96, 1)),
    Figure("docs/evidence.md", "have a standard deviation of {}, where the baseline's have {}.", runs_of("convergence"),
           lambda: [deviation(ends("convergence", arm, size=96)) for arm in ("simreg-chunk", "cross-entropy")]),
    Figure("docs/evidence.md", "SimReg leads by {} (training loss)", runs_of("convergence"), lead_half_way),
    Figure("docs/evidence.md", "searches chose lambda {} at width 32, the lowest that was tried, {} at 64 and {} at 96",
           runs_of("convergence"),
           lambda: [flags_of("simreg-chunk", "simreg-lambda", size=size)[0] for size in (32, 64, 96)]),
    decided("docs/evidence.md", "With 70 % of the tokens it ends {} higher ({} to {}) than", "saving", 0, size=96),
    decided("docs/evidence.md", "and only {} lower ({} to {}) than cross-entropy with as few", "saving", 1, size=96),
    Figure("docs/evidence.md", "saves at most {} % of the tokens, with an interval from {} to {} %", runs_of("saving"),
           partial(saved, "saving", 0, 96)),
    Figure("docs/evidence.md", "At width 96 ({} million tokens)", SEARCH, partial(millions_of_tokens, 96)),
    Figure("docs/evidence.md", "in its one seed SimReg ended {} lower", SEARCH, partial(gain_of_the_search, 96)),
    Figure("README.md", "width 96, {} million tokens", SEARCH, partial(millions_of_tokens, 96)),
    decided("README.md", "8.9 million tokens | {} lower, within chance", "convergence", 0, numbers=1, size=96),
    decided("README.md", "within chance | not run | {} **higher** |", "saving", 0, numbers=1, size=96),
    Figure("docs/evidence.md", "best is {} nats per token below that one at width 32, {} at 64 and {} at 96", SEARCH,
           lambda: [gain for size in (32, 64, 96) for gain in gain_of_the_search(size)]),
    Figure(OBJECTIVES, "take the loss of {} validation tokens", PREFIXES, lambda: [column(PREFIXES, "tokens")[0]]),
    states(OBJECTIVES, "is {} and that of a total collapse", "tests/unit/test_sigreg.py", r'"mean", 768, "([\d.]+)"'),
    states(OBJECTIVES, "total collapse {}, and", "tests/unit/test_sigreg.py", r'"unit", 768, ([\d.]+)\)'),
    states(OBJECTIVES, "With it: {} and", "tests/unit/test_sigreg.py", r'"mean", 768, "[\d.]+", ([\d.e-]+)\)'),
    states(OBJECTIVES, "and {}. `normalize=unit`", "tests/unit/test_sigreg.py", r'"sqrt-d", 768, ([\d.]+)\)'),
    states(OBJECTIVES, "the sum is {}.", "tests/unit/test_sigreg.py", r"768, 0\.994157713, ([\d.e-]+)\)"),
    states(OBJECTIVES, "T = {} / N", "tests/unit/test_sigreg.py", r'"mean", ([\d.]+) / 32\)'),
    states(OBJECTIVES, "or {} (`epps-pulley`, for every N)", "tests/unit/test_sigreg.py", r'"epps-pulley", (1\.\d+)\)'),
    Figure(OBJECTIVES, "benchmarks.sigmoid_synthetic`, {} minutes)", SIGMOID,
           lambda: [sum(map(float, re.findall(r"^(\d+) s\.$", text_of(SIGMOID.file), re.M))) / 60]),
    Figure(OBJECTIVES, "margins are within {} of its table 4 from b = -0.7 to 1", SIGMOID,
           lambda: [max(abs(theirs - ours) for bias, theirs, ours in margins() if bias >= -0.7)]),
    Figure(OBJECTIVES, "table 3 (2 to 20 modalities) are within {}.", SIGMOID, lambda: [max(margins_of_modalities())]),
    Figure(OBJECTIVES, "for smaller b it finds no margin, and we {})", SIGMOID,
           lambda: [max(ours for bias, _, ours in margins() if bias < -0.7)]),
)  # fmt: skip


# ---- the large corpus ----------------------------------------------------------------------------------------------

PREPROCESSING = Source(
    "benchmarks/results/preprocessing.csv", "python -m benchmarks.preprocessing TREE TEXT TOKENIZER..."
)
CORPUS = Source("benchmarks/results/large_corpus.json", "simreg-megatron data corpus-large --out data/large")


def of_side(side: str) -> list[float]:
    manifest = json_of(CORPUS.file)
    return [manifest[name][side] for name in ("tokens", "documents", "characters", "bytes_per_token")]


def left_out(*names: str) -> list[float]:
    return [json_of(CORPUS.file)["left_out"][name] for name in names]


OF_THE_CORPUS = (
    *(Figure("docs/data.md", f"| {side} | {{}} | {{}} | {{}} | {{}} |", CORPUS, lambda side=side: of_side(side))
      for side in ("train", "valid", "test")),
    Figure("docs/data.md", "is left out ({} of {})", CORPUS, lambda: left_out("repeated blocks", "blocks")),
    Figure("docs/data.md", "are left out whole: {},", CORPUS, lambda: left_out("pages nearly like another")),
    Figure("docs/data.md", "by `apt-get download` into `data/large.packages` ({} MB, kept)", CORPUS,
           lambda: [sum(package["bytes"] for package in json_of(CORPUS.file)["packages"]) / 1e6]),
    Figure("docs/data.md", "{} s of processor time (median) for Megatron's tool and {} s for", PREPROCESSING,
           lambda: [median(column(PREPROCESSING, name)) for name in ("theirs_start_s", "ours_start_s")]),
)  # fmt: skip


# ---- bounds and sizes that stand in the code -----------------------------------------------------------------------

WALK = "simreg_megatron/kernels/walk.py"
COUNTED = Source("benchmarks/results/launches.csv", "python -m benchmarks.launches")


def launches_of_a_log_step() -> list[float]:
    """Those of the term in the same form are not counted."""
    at_7b = {"preset": "llama-7b", "chunk": 1024, "impl": "tiled"}
    logged, usual = (one(COUNTED, "launches", log_step=kind, **at_7b) for kind in ("yes", "no"))
    return [logged - usual]


TRIAL, LAUNCHES = "simreg_megatron/comparison.py", "tests/unit/test_launches.py"
VERIFY = "simreg_megatron/checkpoint/verify.py"
STATED = (
    states(OBJECTIVES, "stay alive: {} MiB of them at a time (on a GPU {})",
           "simreg_megatron/parallel/truncated_head.py", r'_SLAB = {"cpu": (\d+) << 20, "cuda": (\d+) << 20}'),
    states("docs/support.md", "logits of Megatron's model to {} |", VERIFY, r"LOGIT_TOLERANCE = ([\d.e-]+)"),
    states("docs/checkpoints.md", "further away than {} of the logits' standard deviation", VERIFY,
           r"LOGIT_TOLERANCE = ([\d.e-]+)"),
    states("docs/checkpoints.md", "differ by less than {} of their value", VERIFY,
           r"PERPLEXITY_TOLERANCE = ([\d.e-]+)"),
    states("docs/checkpoints.md", "files of at most {} GiB", "simreg_megatron/checkpoint/export.py",
           r"SHARD_BYTES = (\d+) << 30"),
    states("docs/cluster.md", "a guess at {} % of the peak", "launch/sizes.py", r"SHARE_OF_PEAK = ([\d.]+)", 100),
    states("docs/cluster.md", "assumes {} % of", "launch/sizes.py", r"SHARE_OF_PEAK = ([\d.]+)", 100),
    states("docs/cluster.md", "share rather than {} %.", "launch/sizes.py", r"SHARE_OF_PEAK = ([\d.]+)", 100),
    states("docs/cluster.md", "of {} TFLOP/s", "launch/sizes.py", r"PEAK = (\d+)e12"),
    states("docs/data.md", "else {} % of the documents", "simreg_megatron/data/commands.py",
           r"default: (0[\d.]+);", 100),
    states("docs/data.md", "in parts of {} MiB", "simreg_megatron/data/task.py", r"BLOCK_BYTES = (\d+) << 20"),
    states("docs/exact.md", "loss over three steps within {}, every parameter's gradient within {}, relative",
           "tests/megatron/parity/cells.py", r"bound: Bound = Bound\(([\d.e-]+), [\d.e-]+, ([\d.e-]+)\)",
           check="make parity"),
    states("docs/exact.md", "every value in the log within {} (", "tests/megatron/parity/cells.py",
           r"logged: float = ([\d.e-]+)", check="make parity"),
    states("docs/checkpoints.md", "are less than {} apart", "tests/megatron/test_export.py",
           r"report\.difference < ([\d.e-]+)", check="pytest tests/megatron/test_export.py"),
    states("docs/exact.md", "with `pre-norm` {} (the radial", "tests/megatron/parity/cells.py",
           r"_PRE_NORM_BOUND = Bound\(1e-6, 1e-5, 1e-5, ([\d.e-]+)\)", check="make parity"),
    states("docs/exact.md", "(tests/distributed, {})", "tests/distributed/test_shard.py", r'"rtol": ([\d.e-]+)'),
    states(PERFORMANCE, "at most {} MiB of them (CPU) or {} MiB (CUDA", WALK,
           r'"cpu": Budget\(kept=(\d+) << 20, work=\d+ << 20\), "cuda": Budget\(kept=(\d+) << 20'),
    states(PERFORMANCE, "and {} MiB (CPU) or {} MiB (CUDA) for tiles", WALK,
           r'"cpu": Budget\(kept=\d+ << 20, work=(\d+) << 20\), "cuda": Budget\(kept=\d+ << 20, work=(\d+)'),
    states(PAGE_OF_SCALE, "what they take, at most {} MiB", WALK,
           r'"cuda": Budget\(kept=\d+ << 20, work=(\d+) << 20\)'),
    states(PERFORMANCE, "may take {} % of the micro-batch at 350M, {} % at 1.3B and {} % at 7B", LAUNCHES,
           r'"llama-350m": ([\d.]+), "llama-1.3b": ([\d.]+), .*"llama-7b": ([\d.]+)', 100),
    Figure(PERFORMANCE, "At 7B that is {} launches beyond", COUNTED, launches_of_a_log_step),
    states(PERFORMANCE, "in chunks of 1024, and {} launches", LAUNCHES, r'int\(row\["launches"\]\) <= (\d+)'),
    states(PERFORMANCE, "in float64 to {} and {}, beyond", TRIAL,
           r"LOSS_ERROR, GRADIENT_ERROR = ([\d.e-]+), ([\d.e-]+)"),
    states(PERFORMANCE, "loss and gradient of some {} tokens", TRIAL, r"_COMPARED = (\d+)"),
    states(PERFORMANCE, "loss within {}, gradient within {} and one rounding", "tests/unit/test_tiled.py",
           r"apart\(loss, expected_loss\) < ([\d.e-]+)[^<]*apart\(grad, expected_grad\) < ([\d.e-]+) \+ rounding"),
)  # fmt: skip


# ---- not measured here ---------------------------------------------------------------------------------------------

NOT_MEASURED = (
    NotMeasured("README.md", "the paper's abstract, and what the plans ask",
                ("convergence by over 30 %", "| 80 % of the tokens | 70 % of the tokens |")),
    NotMeasured("README.md", "logarithms of ratios of the perplexities in the paper's Table 7",
                ("by 0.055 nats per token at 350M and 0.024 at",)),
    NotMeasured("CHANGELOG.md", "what the plans ask", ("after 30 % fewer it ends",)),
    NotMeasured("docs/evidence.md", "what the plan asks at width 96, and the authors' words",
                ("With 70 % of the tokens it ends", "convergence by over 30 %", "this as 30 % fewer",
                 "a speed 1.3 times", "it would be 23 % fewer")),
    NotMeasured("docs/evidence.md", "what the plans ask",
                ("than at a rate of 0.008", "than at\n0.004", "temperatures from 0.005 to 0.05 at",
                 "runs with 80 and 90 % (", "and with 80 %\nof the tokens", "planned after 70 % had")),
    NotMeasured("docs/evidence.md", "the paper's Figures 7 and 8", ("from 0.488 to 0.354 and from 0.445 to 0.333",)),
    NotMeasured("docs/performance.md", "emulated by tests/unit/test_trial.py",
                ("off by 1e-4 of itself at width 1024 and 6e-4 at 4096", "and by 1.5e-4 and 1.4e-3 on an A100",
                 "width 1024 by 3e-4 and 6e-4")),
    NotMeasured("README.md", "the size of the models",
                ("4 layers and at most 443,000", "width 64, 4.0 million", "width 32, 1.1 million")),
    NotMeasured("README.md", "a setting", ("`--init-method-std 0.1` cross", "where both have 0.1 no")),
    NotMeasured("docs/evidence.md", "a setting", ("standard deviation of 0.02 is", "kept 0.02, so")),
    NotMeasured("README.md", "how sure", ("(95 % interval",)),
    NotMeasured("README.md", "what tools/setup.sh asks for", ("6.2 GB of disk",)),
    NotMeasured("README.md", "defaults", ("`--simreg-temperature` | 0.01 |", "`--simreg-chunk-size` | 1024 |")),
    NotMeasured("docs/support.md", "a Python, not a number",
                ("| 3.12 (their wheels", "| 3.12 | exact, with one warning")),
    NotMeasured("CONTRIBUTING.md", "what `make` prints; tests/unit/test_code_blocks.py compares it",
                ("once: 1 to 4 minutes, 6.2 GB", "tests (4 to 10 minutes on", "root; 15 minutes",
                 "table (5 minutes on 2 cores)", "versions.md (15 to 30 minutes", "first: 190 MB",
                 "counted without one (10 seconds)")),
    NotMeasured("docs/cluster.md", "the pulse of a run's lock, and how long one that is touched is waited for",
                ("touches it every 10 s", "less 2 minutes")),
    NotMeasured("docs/cluster.md", "defaults", ("MINUTES` | 10 |", "`--keep N` | 3 |")),
    NotMeasured("docs/cluster.md", "the paper's, and their share of the peak by launch/estimate.py",
                ("56 GPU hours for 350M and over 2,000 for 7B: 14 % and at most 30 % of the peak",
                 "took over 2,000 GPU hours, which is 15.6 h on 128 GPUs")),
    NotMeasured("docs/cluster.md", "counted: batch times iterations, at two bytes each, of four characters",
                ("52.4 billion tokens (the", "105 GB of", "some 200 GB of plain text")),
    NotMeasured("docs/cluster.md", "what launch/slurm/needs.py prints; tests/unit/test_slurm.py compares it",
                ("reads  52.4 billion", "of the 53 billion", "1,519 GPU hours", "at 3.42 s a step (guessed at 40% of",
                 "87.9 GiB a checkpoint, 351.4 GiB for", "has 14 bytes a weight")),
    NotMeasured("docs/cluster.md", "the maker's", ("NVLink carries 400 GB/s",)),
    NotMeasured("docs/data.md", "a setting, and about how much",
                ("up to 64 times its share (6 million", "about 25 times its size")),
    NotMeasured("docs/data.md", "the paper's share", ("most frequent 2 % of",)),
    NotMeasured("docs/evaluation.md", "of the test's making", ("It asks 500 questions",)),
    NotMeasured("docs/evaluation.md", "about how long one waits", ("two CPU cores, 20 minutes",)),
    NotMeasured("docs/first-hour.md", "about the size of .venv", ("6.2 GB of packages",)),
    NotMeasured("docs/first-hour.md", "settings", ("--lr 1e-3 --min-lr 1e-4",)),
    NotMeasured("docs/evidence.md", "about how long one waits", ("some 4 hours of a core",)),
    NotMeasured("docs/evidence.md", "the plan's bound, and a level of trust",
                ("5 % more is ruled out", "Less than 5 %; how much", "is the 95 % interval of", "(95 % interval 51")),
    NotMeasured("docs/evidence.md", "what a plan asks, and the protocol",
                ("with 30 % fewer tokens", "SimReg with 70 % of the tokens", "its 95 % interval",
                 "After 30 % fewer it still ends lower", "and with 70 % of the tokens it ends", "(95 % interval",
                 "| 90 % of the tokens", "| 80 % of the tokens", "| 70 % of the tokens",
                 "at 70 % of the tokens for both", "runs with 80 %, a lower", "those with 70 %, an upper")),
    NotMeasured("docs/reliability.md", "how sure", ("processes, with its 95 % interval",)),
    NotMeasured("docs/exact.md", "numbers of four bytes, and of two, counted", ("(8 bytes)", "16 bytes a token",
                "x 2 bytes a sequence")),
    NotMeasured("docs/exact.md", "what tests/megatron/inner_script.py asserts", ("2 layers run 4 times",)),
    NotMeasured("docs/exact.md", "0.5 over 0.01", ("50 times larger",)),
    NotMeasured(OBJECTIVES, "weights to start from: settings",
                ("pair_reduction=balanced` | 0.1 |", "`mic` | 0.05 |", "`z-loss` | 1e-4 |", "`sce` | 0.1 |",
                 "`sigreg` | 1 (")),
    NotMeasured(OBJECTIVES, "the post's", ("the scaled form at 0.026",)),
    NotMeasured(PERFORMANCE, "counted: 2 c d, and three times the parameters",
                ("2 million multiply-adds", "about 1 billion")),
    NotMeasured(PERFORMANCE, "products, counted", ("| 1.5 | them |", "| 2 | that |", "| 2.5 | a panel |")),
    NotMeasured(PERFORMANCE, "aims", ("| 20 | 1536", "| 1e-5; 3e-4 |", "| 5 %, better 2 |",
                "goes | 3e-4 |", "| 256 MiB, better 64 |")),
    NotMeasured(PERFORMANCE, "limits of the model in benchmarks/launches.py, and a size",
                ("2.5 TB/s, products at 600 TFLOP/s", "own, at 40 % of the peak",
                 "launches at 4 x 4096 x 4096")),
    NotMeasured(PERFORMANCE, "the paper's Table 3, and the maker's", ("373,450 MB and more", "an H800 has 80 GB")),
    NotMeasured(PERFORMANCE, "counted: what a token has", ("at most 32 MiB at 131,072 tokens",)),
    NotMeasured(PERFORMANCE, "of the number type", ("has the 1e-3 of bfloat16 itself",)),
    NotMeasured("docs/data.md", "settings of the recipe (simreg_megatron/data/large)",
                ("65 % of its characters", "60 %, any end", "4.5 % each for", "at least 0.7, by MinHash")),
    NotMeasured("docs/data.md", "as logged when it was first made, beside other work",
                ("reading about 9,\n  leaving out repeats 3.5, the tokenizer and tokenizing 5",
                 "GCIDE) 28.4, Linux 13.0",
                 "glosses 10.0, Qt 9.0, An Anarchist FAQ 7.1, Python 5.7, PostgreSQL 4.8, Perl 4.5, FOLDOC 4.4",
                 "4.2 million characters")),
    NotMeasured(PAGE_OF_SCALE, "numbers of eight, of four and of two bytes, counted",
                ("labels (16 bytes a token)", "a token (8 bytes)", "of 16 bytes a token", "x width x 2 bytes",
                 "hidden states are 32 MiB of that")),
    NotMeasured(PERFORMANCE, "sizes of what is spoken of",
                ("losses of 1e-8", "less than 1e-30")),
)  # fmt: skip

RELIABILITY = "docs/reliability.md"
FAULTS = Source("benchmarks/results/faults.csv", "make faults FAULTS_ARGS='--results benchmarks/results/faults.csv'")
_RANKS = {"one": 1, "tp2-sp": 2, "pp2": 2, "cp2": 2, "dp2": 2, "ep2": 2}
FUZZ = Source("benchmarks/results/fuzz.csv", "make fuzz FUZZ_ARGS=--record")
STRESS = Source("benchmarks/results/stress.csv", "make stress STRESS_ARGS='--small 1000000 --large 200 --record'")
STRESSED_FORMS = ("reference", "tiled")
QUIET_FAULTS = Source(
    "benchmarks/results/faults-quiet.csv",
    "python -m tests.faults --results FILE --only one-sigkill-random-0-command tp2-sp-sigkill-last-step-2-command "
    "pp2-sigterm-last-step-2-command cp2-sigint-last-step-2-command dp2-abort-random-0-command "
    "ep2-exception-random-0-command",
)
SUITE = Source("benchmarks/results/suite.csv", 'make test PYTEST_ARGS="--shuffle 2"')
FLAGS = Source("benchmarks/results/flags.csv", "make flags FLAGS_ARGS='--combinations 5000 --record'")
RESUMED = Source("benchmarks/results/resumed_releases.csv", "python -m tests.versions.carried --sources DIR --record")


def resumes(*, up: bool, refused: bool | None = None) -> list[dict[str, str]]:
    """From a release to the same or a newer one, or to an older one."""
    rows = [row for row in csv_of(RESUMED.file) if (row["saved_by"] <= row["resumed_by"]) == up]
    return [row for row in rows if refused is None or refused == (not row["apart"])]


def cases_of(size: str) -> list[float]:
    return column(STRESS, "cases", size=size)


def of_flags(kind: str, what: str = "combinations") -> list[float]:
    return column(FLAGS, what, kind=kind)


def seconds_to_go_on() -> list[float]:
    """From the command to the end of the first step, of runs that had a step left."""
    return [float(row["seconds"]) for row in csv_of(QUIET_FAULTS.file) if float(row["seconds"])]


OF_RELIABILITY = (
    states(RELIABILITY, "| processor time | {} s |", "tests/fuzz/bar.py", r"\nSECONDS = ([\d.]+)"),
    states(RELIABILITY, "| memory | {} times the input, and {} MiB |", "tests/fuzz/bar.py",
           r"TIMES_ITS_SIZE = (\d+)\nCONSTANT = (\d+) << 20"),
    Figure(RELIABILITY, "All {} faults of the list", FAULTS, lambda: [len(csv_of(FAULTS.file))]),
    Figure("README.md", "bit for bit | {} such faults of {}, on CPU", FAULTS,
           lambda: [sum(row["equal"] == "yes" for row in csv_of(FAULTS.file)),
                    sum(not row["then"] for row in csv_of(FAULTS.file))]),
    Figure(RELIABILITY, "do nothing else {} such runs took {} to {} s", QUIET_FAULTS,
           lambda: [len(seconds_to_go_on()), min(seconds_to_go_on()), max(seconds_to_go_on())]),
    Figure(RELIABILITY, "in another layout, one is {} away, and the others at most {}:", FAULTS,
           lambda: sorted((float(row["equal"]) for row in csv_of(FAULTS.file) if row["then"]), reverse=True)[:2]),
    Figure(RELIABILITY, "have been run, and {} of them were sound", FAULTS,
           lambda: [sum(not row["wrong"] for row in csv_of(FAULTS.file))]),
    Figure(RELIABILITY, "{} combinations have been run: {} trained, {} were refused in {} different sentences, "
           "and {} failed in Megatron", FLAGS,
           lambda: [sum(column(FLAGS, "combinations")) - of_flags("batches")[0], sum(of_flags("ran")),
                    sum(of_flags("refused")), len(of_flags("refused")), sum(of_flags("Megatron's own"))]),
    Figure(RELIABILITY, "{} of those that trained were also compared", FLAGS,
           lambda: [sum(of_flags("ran", "compared"))]),
    Figure(RELIABILITY, "the same or a newer one all {} resumes went on", RESUMED,
           lambda: [len(resumes(up=True, refused=False))]),
    Figure(RELIABILITY, "a clipped gradient was {}. Of the {} to an older release, the {} from 0.17 to 0.16", RESUMED,
           lambda: [max(float(row["apart"]) for row in csv_of(RESUMED.file) if row["apart"]), len(resumes(up=False)),
                    len(resumes(up=False, refused=False))]),
    NotMeasured(RELIABILITY, "counted: what tests/megatron/test_planted.py asserts",
                ("and of a gradient | 314 |", "one is sound | 670 |", "the same | 670 |", "loss is\" | 168 |",
                 "step (40 runs)")),
    Figure(RELIABILITY, "Wrong ends that are left: {}.", FLAGS, lambda: [sum(of_flags("wrong"))]),
    NotMeasured(RELIABILITY, "settings, an aim, and what a format allows",
                ("in turn, 10 minutes", "at most 4 KiB", "to be 128 MiB")),
    NotMeasured("CONTRIBUTING.md", "a setting", ("mutated inputs (10 minutes;",)),
    Figure("CONTRIBUTING.md", "takes about {} minutes on two cores that do nothing else", SUITE,
           lambda: [seconds / 60 for seconds in column(SUITE, "seconds", beside="nothing")]),
    Figure("CONTRIBUTING.md", "and\n{} minutes beside other work", SUITE,
           lambda: [seconds / 60 for seconds in column(SUITE, "seconds", order="shuffled 2")]),
    Figure(RELIABILITY, "{} inputs in counted runs", FUZZ, lambda: [sum(column(FUZZ, "inputs"))]),
    Figure(RELIABILITY, "of each run; {} findings, all fixed", FUZZ, lambda: [sum(column(FUZZ, "findings"))]),
    NotMeasured(RELIABILITY, "found by a fuzzer, and measured then", ("a loop of 12 s", "| 76 MiB for")),
    Figure(RELIABILITY, "{} small and {} large sequences have been compared", STRESS,
           lambda: [sum(cases_of("small")) / len(STRESSED_FORMS), sum(cases_of("large"))]),
    Figure(RELIABILITY, "error of a value was {} of its bound", STRESS, lambda: [max(column(STRESS, "value"))]),
    Figure(RELIABILITY, "`make test` took {} s on two", SUITE, lambda: column(SUITE, "seconds", beside="nothing")),
    Figure(RELIABILITY, "and {} s beside two processes", SUITE, lambda: column(SUITE, "seconds", order="shuffled 2")),
    Figure(RELIABILITY, "that of a gradient {}, and all", STRESS, lambda: [max(column(STRESS, "gradient"))]),
    Figure(RELIABILITY, "n = 1024 delta is {}.", Source("tests/stress/judge.py", "make stress"),
           lambda: [judge.delta(0.01, 1024, 1024)]),
    NotMeasured(RELIABILITY, "exp(-80), rounded up", ("below 1e-34 may",)),
    NotMeasured(RELIABILITY, "settings of tests/stress/cases.py and campaign.py",
                ("goes from 0.001 to 1", "cosines are 1 - 1e-7,", "from 1e-20 to 1e20 (1e-3 to 1e3 in")),
    NotMeasured(RELIABILITY, "a count of processes", tuple(f"| {name} | {ranks} |" for name, ranks in _RANKS.items())),
    NotMeasured(RELIABILITY, "read from the process table when it was found", ("690 MB of memory gone", "some 48 MiB")),
)  # fmt: skip

ENTRIES: tuple[Entry, ...] = (
    *OF_THE_LOSS,
    *OF_THE_STEP,
    *OF_H200,
    *OF_SCALE,
    *OF_THE_DEMO,
    *OF_OBJECTIVES,
    *OF_THE_CORPUS,
    *STATED,
    *OF_RELIABILITY,
    Made("docs/cluster.md", "At commit", "python -m launch.estimate"),
    Made("docs/cluster.md", "| model | nodes |", "python -m launch.estimate"),
    *NOT_MEASURED,
)
AWAITED: tuple[str, ...] = ()
"""Marked tables whose numbers are from before their benchmarks kept what they measure."""
LEDGER = Ledger(PAGES, ENTRIES, AWAITED)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ledger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the numbers of the files into the pages")
    if parser.parse_args().write:
        for page in write(LEDGER):
            print(f"{page}: numbers replaced; read the words around them")
    for name in AWAITED:
        print(f"the table {name} awaits `python -m benchmarks.{name.partition('-')[0]}`")
    found = complaints(LEDGER)
    raise SystemExit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
