# SPDX-License-Identifier: Apache-2.0
"""From what was asked and what machine this is to what would run: a pure function, `build_plan`."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from launch import preflight, sizes
from launch.flags import (
    Flag,
    LaunchError,
    flag_name,
    flag_names,
    flag_number,
    flag_value,
    flatten,
    group_flags,
    read_preset,
    without,
)

if TYPE_CHECKING:
    from simreg_megatron import SimRegConfig

ROOT = Path(__file__).resolve().parent.parent
PRESETS = Path(__file__).resolve().parent / "models"
LAYOUTS = Path(__file__).resolve().parent / "layouts"
TINY = "tiny"
_OWN_SCRIPT = ROOT / "simreg_megatron" / "pretrain.py"
BUILTIN_CORPUS = ROOT / "data" / "builtin"

NO_DATA = "YOUR_DATA"  # stands for --data in a dry run without it, and is none of the words in the pages
_OWN_DATA = {"--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data"}
_ADAGC = ("--adagc", "--adagc-lambda-rel", "1.04", "--adagc-beta", "0.99")
# What the paper compares: one objective each, all else alike; SimReg on chunks (table 2's "SimReg-Chunk") and on whole
# sequences ("SimReg", in both tables). Its weights for the baselines are not stated.
RECIPES: dict[str, tuple[str, ...]] = {
    "baseline": _ADAGC,
    "paper": (*_ADAGC, "--simreg-lambda", "auto"),
    "paper-full": (*_ADAGC, "--simreg-lambda", "auto", "--simreg-chunk-size", "0"),
    **{
        name: (*_ADAGC, "--simreg-objective", name, "--simreg-lambda", "0.1")
        for name in ("simcse", "cpretrain", "creg", "sce")
    },
}
_READ_BY_PRETRAIN_GPT = {"--sft", "--fim-data", "--spec", "--logits-load-dir", "--per-dataset-sequences-path"}
_PRECISIONS = {"--bf16", "--fp16"}
_OF_A_START = {  # where a run's first weights come from; they would throw the optimizer away each time it goes on
    "--load",
    "--ckpt-step",
    "--finetune",
    "--no-load-optim",
    "--no-load-rng",
    "--pretrained-checkpoint",
}
_OR_NOT_AT_ALL = "--exit-on-missing-checkpoint"  # Megatron would start anew where the checkpoint has gone meanwhile
_FSDP = {"--use-torch-fsdp2", "--use-megatron-fsdp"}
_OVERLAPS_EXPERTS = "--overlap-moe-expert-parallel-comm"


@dataclass(frozen=True)
class Machine:
    """What the run finds here: the facts that choose flags."""

    gpus: int = 0
    transformer_engine: bool = False
    apex_gradient_kernel: bool = False  # fuses gradient accumulation; built with NVIDIA's Apex only
    world_size: int = 1
    local_world_size: int = 1
    whole_nodes: bool = False  # submitted to SLURM: the number of ranks is set by --nodes


class Corpus(Protocol):
    """Where tokenized text and its tokenizer lie; `simreg_megatron.tools.builtin_corpus` builds one."""

    @property
    def train_prefix(self) -> str | os.PathLike[str]: ...

    @property
    def valid_prefix(self) -> str | os.PathLike[str]: ...

    @property
    def tokenizer_model(self) -> str | os.PathLike[str]: ...


@dataclass(frozen=True)
class PlannedCorpus:
    """The built-in corpus before it is built."""

    train_prefix: Path = BUILTIN_CORPUS / "train"
    valid_prefix: Path = BUILTIN_CORPUS / "valid"
    tokenizer_model: Path = BUILTIN_CORPUS / "tokenizer.model"


@dataclass(frozen=True)
class Plan:
    """What would run: the script, its flags, its environment, and what the user should know."""

    family: str
    model: str
    script: Path
    flags: tuple[Flag, ...]
    environment: dict[str, str]
    on_cpu: bool
    builtin_corpus: bool
    output: Path
    notes: tuple[str, ...]
    plain: bool = False

    @property
    def arguments(self) -> list[str]:
        """Megatron's command line, word by word."""
        return flatten(self.flags)

    @property
    def number_type(self) -> str:
        return next((name for name in ("bf16", "fp16") if f"--{name}" in flag_names(self.flags)), "fp32")

    @property
    def tree(self) -> Path | None:
        """The source tree of Megatron-LM whose script runs; None where it is ours, with the installed Megatron."""
        return None if self.script == _OWN_SCRIPT else self.script.parent


def model_names(family: str) -> list[str]:
    """The presets of a family, from their files, tiny first."""
    names = [path.stem.partition("-")[2] for path in PRESETS.glob(f"{family}-*.args")]
    return sorted(names, key=lambda name: (name != TINY, not name.endswith("m"), name))  # millions before billions


def layout_names() -> list[str]:
    """The kinds of machines that the sizes have a layout for."""
    return sorted(path.name for path in LAYOUTS.iterdir() if path.is_dir())


def read_layout(name: str, family: str, model: str) -> list[Flag]:
    """How a size is spread over machines of one kind: `--nodes N`, and Megatron's flags.

    Raises:
        LaunchError: there is none for this size.
    """
    path = LAYOUTS / name / f"{family}-{model}.args"
    if not path.is_file():
        raise LaunchError(f"there is no layout {name} for {family} {model}: leave --layout out, or write {path}")
    return read_preset(path)


def resumed(plan: Plan) -> Plan:
    """The plan of a run that goes on from its own checkpoints, whatever it began with; never from step 0."""
    folder = flag_value(plan.flags, "--save") or ""
    flags = without(plan.flags, {*_OF_A_START, _OR_NOT_AT_ALL})
    return replace(plan, flags=(*flags, ("--load", folder), (_OR_NOT_AT_ALL,)))


def build_plan(
    family: str,
    options: argparse.Namespace,
    user_words: Sequence[str],
    machine: Machine,
    *,
    environ: Mapping[str, str],
    corpus: Corpus | None = None,
    stamp: str = "TIME",
) -> Plan:
    """Choose every flag of the run; the user's own come last and replace the preset's.

    Args:
        family: "llama" or "mixtral".
        options: what `make_parser(family)` read.
        user_words: what it did not know: flags for Megatron.
        machine: the hardware and the number of ranks.
        environ: environment variables; MEGATRON_PATH and SIMREG_CPU are read.
        corpus: the built-in corpus once it is built; its planned place before.
        stamp: names the output folder of a tiny run.

    Raises:
        LaunchError: the run cannot start as asked.
    """
    asked = group_flags(user_words)
    _refuse_contradiction(options.recipe, asked)
    _refuse_flags_of_plugin(options, asked)
    user = [*without(group_flags(RECIPES.get(options.recipe, ())), flag_names(asked)), *asked]
    model = options.model or TINY
    on_cpu = _choose_cpu(model, user, machine, environ)
    builtin = _uses_builtin_corpus(model, options, user)
    notes = [*_say_off(options, asked), *_say_default(family, options, machine, builtin=builtin)]
    preset = _preset(family, model, options.layout)
    preset, size_notes = _fit_preset(preset, user, options.ffn, machine, strict=model != TINY)
    output = options.output or _default_output(family, model, user, stamp)
    chosen = [
        *_without_idle_chunks(preset, user),
        *_hardware_flags([*preset, *user], machine, on_cpu=on_cpu, large=model != TINY),
        *_data_flags(options, corpus or PlannedCorpus(), [*preset, *user], builtin=builtin),
        *_cache_flags(output, builtin=builtin),
        *_output_flags(output, saves=_saves(options, [*preset, *user], user, model)),
    ]
    flags = (*without(chosen, flag_names(user)), *user)
    config = preflight.check_own_flags(flags)
    return Plan(
        family=family, model=model, script=_choose_script(environ, user), flags=flags, on_cpu=on_cpu,
        environment=_environment(flags, on_cpu=on_cpu), builtin_corpus=builtin, output=output,
        notes=(*notes, *size_notes, *_say_large_lambda(config, flags)), plain=options.plain,
    )  # fmt: skip


def _preset(family: str, model: str, layout: str | None) -> list[Flag]:
    preset = read_preset(PRESETS / f"{family}-{model}.args")
    if not layout:
        return preset
    spread = without(read_layout(layout, family, model), {"--nodes"})  # the job's to keep
    return [*without(preset, flag_names(spread)), *spread]


def _saves(options: argparse.Namespace, flags: Sequence[Flag], user: Sequence[Flag], model: str) -> bool:
    """Whether the run saves: every real size does, and a tiny one that is asked to.

    Raises:
        LaunchError: it could not resume from what it saves.
    """
    if options.auto_resume:
        _check_resumable(options, flags, model)
    elif model == TINY and "--save-interval" in flag_names(user) and not _names_folder(options, user):
        raise LaunchError("--save-interval needs --output DIR: by default each tiny run has a folder of its own")
    return model != TINY or options.auto_resume or "--save-interval" in flag_names(user)


def missing_kernels(plan: Plan, machine: Machine) -> list[str]:
    """What would make the steps of a real size faster and is not on the machine that runs them."""
    if plan.on_cpu or plan.model == TINY:
        return []
    missing = []
    if not machine.transformer_engine:
        missing.append(
            "Transformer Engine is not installed: Megatron's own layers are slower and keep every score of attention, "
            "so a micro-batch that fits with it may run out of memory (pip install --no-build-isolation "
            "'transformer-engine[pytorch]')"
        )
    if not machine.apex_gradient_kernel:
        missing.append(
            "NVIDIA Apex's kernel that adds weight gradients in place is not installed: steps are slower without it "
            "(build github.com/NVIDIA/apex with --cuda_ext; never `pip install apex`)"
        )
    return missing


def _refuse_contradiction(recipe: str | None, asked: Sequence[Flag]) -> None:
    """The user's flags win over a recipe's, but what makes it another recipe is refused."""
    weight, objective = (flag_value(asked, name) for name in ("--simreg-lambda", "--simreg-objective"))
    chunk_size = flag_value(asked, "--simreg-chunk-size")
    if recipe == "baseline" and _simreg_asked(asked) and objective != "none":
        flag = f"--simreg-lambda {weight}" if weight else f"--simreg-objective {objective}"
        raise LaunchError(
            f"--recipe baseline trains on cross-entropy alone, and {flag} asks for more: take --recipe paper, "
            "or leave the flag out"
        )
    if recipe not in (None, "baseline") and weight is not None and _is_zero(weight):
        raise LaunchError(
            f"--recipe {recipe} trains with its objective, and --simreg-lambda {weight} turns that off: take --recipe "
            "baseline, or leave the flag out"
        )
    if recipe not in (None, "baseline") and objective not in (None, recipe):
        raise LaunchError(
            f"--recipe {recipe} and --simreg-objective {objective} both name the objective: leave one of them out"
        )
    if recipe == "paper-full" and chunk_size not in (None, "0"):
        raise LaunchError(
            f"--recipe paper-full compares within whole sequences, and --simreg-chunk-size {chunk_size} cuts them: "
            "take --recipe paper, or leave the flag out"
        )


def _refuse_flags_of_plugin(options: argparse.Namespace, asked: Sequence[Flag]) -> None:
    given = [name for name in flag_names(asked) if name.startswith(("--simreg-", "--adagc"))]
    given += ["--recipe"] if options.recipe else []
    if options.plain and given:
        raise LaunchError(f"--plain leaves the plugin out, and {min(given)} is the plugin's: leave one of them out")


def _check_resumable(options: argparse.Namespace, flags: Sequence[Flag], model: str) -> None:
    given = flag_names(flags)
    if model == TINY and not _names_folder(options, flags):
        raise LaunchError(
            "a run that can resume (--auto-resume, and every submitted one) needs --output DIR: by default each tiny "
            "run has a folder of its own"
        )
    if "--save-interval" not in given:
        raise LaunchError(
            "a run that can resume (--auto-resume, and every submitted one) needs --save-interval N: nothing would be "
            "saved to resume from"
        )


def _names_folder(options: argparse.Namespace, flags: Sequence[Flag]) -> bool:
    """Whether all ranks, and all starts, know the same folder for checkpoints."""
    return bool(options.output) or "--save" in flag_names(flags)


def _choose_cpu(model: str, user: Sequence[Flag], machine: Machine, environ: Mapping[str, str]) -> bool:
    asked = "--simreg-cpu" in flag_names(user) or environ.get("SIMREG_CPU", "0") not in ("", "0")
    if machine.gpus and not asked:
        if machine.local_world_size > machine.gpus:
            raise LaunchError(
                f"{machine.local_world_size} processes need as many GPUs, this machine has {machine.gpus}: "
                f"give torchrun --nproc-per-node {machine.gpus}"
            )
        return False
    if model != TINY and not asked:
        raise LaunchError(
            f"--model {model} needs a GPU and this machine has none: leave --model out for the tiny one, "
            "or insist with --simreg-cpu"
        )
    gpus_alone = {
        "--distributed-backend": ("nccl",),
        "--transformer-impl": ("transformer_engine",),
        "--simreg-impl": ("gemm", "triton"),
    }
    for name, values in gpus_alone.items():
        if (value := flag_value(user, name)) in values:
            raise LaunchError(f"{name} {value} needs a GPU and this run has none: leave the flag out")
    return True


def _uses_builtin_corpus(model: str, options: argparse.Namespace, user: Sequence[Flag]) -> bool:
    """Whether nothing else was given to train on."""
    given = flag_names(user)
    own = sorted(given & _OWN_DATA)
    if options.data and own:
        raise LaunchError(f"--data and {own[0]} both name the training text: give one")
    if options.valid_data and not options.data:
        raise LaunchError("--valid-data goes with --data PREFIX, the training text")
    if options.data or own:
        if not options.tokenizer and "--tokenizer-type" not in given:
            text = "--data" if options.data else own[0]
            raise LaunchError(f"{text} needs --tokenizer PATH, the tokenizer that made it")
        return False
    if model != TINY:
        raise LaunchError(
            f"--model {model} needs your text: give --data PREFIX (of PREFIX.bin and PREFIX.idx) and --tokenizer PATH"
        )
    if options.tokenizer or "--tokenizer-type" in given:
        raise LaunchError("--tokenizer goes with --data: the built-in corpus has its own tokenizer")
    return True


def with_stand_ins(options: argparse.Namespace, words: Sequence[str]) -> argparse.Namespace:
    """For a dry run of a real size before there is text: words in its place."""
    given = flag_names(group_flags(words))
    if options.model in (None, TINY) or options.data or given & _OWN_DATA:
        return options
    tokenizer = options.tokenizer or (None if "--tokenizer-type" in given else "TOKENIZER")
    return argparse.Namespace(**{**vars(options), "data": [NO_DATA], "tokenizer": tokenizer})


def _say_off(options: argparse.Namespace, asked: Sequence[Flag]) -> list[str]:
    """Whoever starts these scripts most likely wants it; who says 0, or baseline, has chosen."""
    if options.recipe or options.plain or flag_names(asked) & {"--simreg-lambda", "--simreg-objective"}:
        return []
    if options.model in (None, TINY):
        return ["SimReg is off: add --simreg-lambda 1 to train with it"]
    return ["SimReg is off: add --simreg-lambda auto or --recipe paper to train with it"]


def _say_large_lambda(config: SimRegConfig, flags: Sequence[Flag]) -> list[str]:
    """Note a lambda above twice the authors' rule for this width: 10, theirs at width 1024, harms a tiny model."""
    width = flag_number(flags, "--hidden-size", 1)
    if not config.trains or config.objective != "simreg":
        return []
    weight, usual = config.weight(width), replace(config, lambda_="auto").weight(width)
    if weight <= 2 * usual:
        return []
    return [
        f"--simreg-lambda {weight:g} is large for width {width}: the authors' rule (auto) gives {usual:.1f}, and small "
        "models did best with about 1"
    ]


def _say_default(family: str, options: argparse.Namespace, machine: Machine, *, builtin: bool) -> list[str]:
    if options.model:
        return []
    others = [name for name in model_names(family) if name != TINY]
    text = "the built-in corpus" if builtin else "your text"
    sizes_there = "|".join(others)
    notes = [f"no --model given: the tiny {family} on {text} (--model {sizes_there} for the paper's sizes)"]
    if machine.gpus:
        notes.append(
            f"a real size: bash launch/pretrain_{family}.sh --model {others[0]} "
            "--data PREFIX --tokenizer PATH --simreg-lambda auto"
        )
    return notes


def _fit_preset(
    preset: list[Flag], user: Sequence[Flag], ffn: str, machine: Machine, *, strict: bool
) -> tuple[list[Flag], list[str]]:
    """Bring sizes that depend on each other together: FFN and ranks, batch and ranks, warm-up and length."""
    notes: list[str] = []
    preflight.check_layout([*preset, *user], machine.world_size, machine.local_world_size if machine.whole_nodes else 0)
    for name in ("--save-interval", "--log-interval", "--seq-length"):
        flag_number(user, name, 1)  # refuses what is no positive number
    preset = _fit_ffn(preset, user, ffn, notes)
    preset = _fit_batch(preset, user, machine, notes, strict=strict)
    preset = _fit_warmup(_in_samples(preset, user, notes), user, notes)
    sequence = flag_value([*preset, *user], "--seq-length") or ""
    return [*preset, ("--max-position-embeddings", sequence)], notes


def _fit_ffn(preset: list[Flag], user: Sequence[Flag], ffn: str, notes: list[str]) -> list[Flag]:
    name = "--ffn-hidden-size"
    split = sizes.ffn_split([*preset, *user])
    if ffn != "literal":
        if name in flag_names(user):
            raise LaunchError(f"--ffn and {name} name the same size: give one")
        preset = _replace(preset, name, str(_asked_ffn(ffn, flag_number(preset, name, 1), split)))
    whose = "you asked for it" if ffn != "literal" or name in flag_names(user) else "it is the paper's"
    warning = sizes.check_ffn(flag_number([*preset, *user], name, 1), split, whose)
    notes += [warning] if warning else []
    return preset


def _asked_ffn(ffn: str, literal: int, split: int) -> int:
    if ffn == "aligned":
        return sizes.aligned_neighbours(literal, split)[0]
    if ffn.isdecimal() and int(ffn) > 0:
        return int(ffn)
    raise LaunchError(f"--ffn takes literal, aligned or a positive number, not {ffn!r}")


def _fit_batch(
    preset: list[Flag], user: Sequence[Flag], machine: Machine, notes: list[str], *, strict: bool
) -> list[Flag]:
    """Where the user chose none: a micro-batch that divides each replica's share of the global batch."""
    both = [*preset, *user]
    replicas = machine.world_size // math.prod(sizes.model_parallel_sizes(both))
    batch = flag_number(both, "--global-batch-size", 1)
    if batch % replicas:
        fitting = -(-batch // replicas) * replicas
        if strict or "--global-batch-size" in flag_names(user):
            raise LaunchError(
                f"the global batch of {batch} sequences cannot be shared by {replicas} data-parallel ranks: "
                f"give --global-batch-size {fitting}{_other_ranks(batch, replicas, machine)}"
            )
        notes.append(f"{replicas} data-parallel ranks cannot share {batch} sequences: using {fitting}")
        batch, preset = fitting, _replace(preset, "--global-batch-size", str(fitting))
    if "--rampup-batch-size" in flag_names(user):
        return preset
    if "--micro-batch-size" in flag_names(user):
        micro = flag_number(user, "--micro-batch-size", 1)
        if batch // replicas % micro:
            raise LaunchError(
                f"each of {replicas} data-parallel ranks has {batch // replicas} sequences of the global batch, which "
                f"micro-batches of {micro} cannot share: give --micro-batch-size "
                f"{sizes.largest_divisor(batch // replicas, micro)}"
            )
        return preset
    stages = flag_number(both, "--pipeline-model-parallel-size", 1)
    share = batch // replicas
    # The tiny presets name none: the whole share, or what leaves each pipeline stage a micro-batch.
    limit = flag_number(preset, "--micro-batch-size", max(1, share // stages))
    micro = sizes.largest_divisor(share, limit)
    return _replace(preset, "--micro-batch-size", str(micro))


def _other_ranks(batch: int, replicas: int, machine: Machine) -> str:
    """Name more or fewer ranks, in whole nodes, that could share the batch as it is: the run would be the same."""
    now, node = machine.world_size, machine.local_world_size
    counts = [now // replicas * share for share in range(1, batch + 1) if not batch % share]
    whole = [count for count in counts if not count % node]
    by_nodes = machine.whole_nodes or (now > node and bool(whole))  # of one node, some of the GPUs will do
    there = whole if by_nodes else counts
    near = [count for count in there if count < now][-1:] + [count for count in there if count > now][:1]
    ranks, nodes = " or ".join(map(str, near)), " or ".join(str(count // node) for count in near)
    if machine.whole_nodes:
        return f", or --nodes {nodes}" if near else ""
    return f", or start {ranks} ranks{f', {nodes} nodes' if by_nodes else ''}"


def _in_samples(preset: list[Flag], user: Sequence[Flag], notes: list[str]) -> list[Flag]:
    """The preset's length and warm-up give way to a length in samples, beside which Megatron takes no iterations."""
    if "--train-samples" not in flag_names(user):
        return preset
    batch, samples = flag_number([*preset, *user], "--global-batch-size", 1), flag_number(user, "--train-samples", 1)
    warmup = min(batch * flag_number(preset, "--lr-warmup-iters", 1), samples // 10)
    preset = without(preset, {"--train-iters", "--lr-decay-iters", "--lr-warmup-iters"})
    if flag_names(user) & {"--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-iters"}:
        return preset
    notes.append(f"--train-samples: warming up for {warmup} of {samples} samples (set --lr-warmup-samples to choose)")
    return [*preset, ("--lr-warmup-samples", str(warmup))]


def _fit_warmup(preset: list[Flag], user: Sequence[Flag], notes: list[str]) -> list[Flag]:
    """A run cut short keeps a schedule: Megatron refuses a warm-up as long as the decay."""
    name = "--lr-warmup-iters"
    both = [*preset, *user]
    end = flag_number(both, "--lr-decay-iters", flag_number(both, "--train-iters", 1))
    own = flag_value(user, name) or ""
    if own.isdecimal() and int(own) >= end and "--train-samples" not in flag_names(user):
        raise LaunchError(f"{name} {own} leaves none of {end} iterations for the decay: give a smaller number")
    chosen = flag_names(user) & {name, "--lr-warmup-fraction", "--train-samples"}
    if chosen or flag_number(preset, name, 1) < end:
        return preset
    notes.append(f"{end} iterations are too few for the preset's warm-up: using {end // 10} (set {name} to choose)")
    return _replace(preset, name, str(end // 10))


def _replace(flags: list[Flag], name: str, value: str) -> list[Flag]:
    """The flags with one value changed in its place, or added at the end."""
    if name not in flag_names(flags):
        return [*flags, (name, value)]
    return [(name, value) if flag_name(flag) == name else flag for flag in flags]


def _simreg_asked(user: Sequence[Flag]) -> bool:
    objective = flag_value(user, "--simreg-objective") or ""
    return not _is_zero(flag_value(user, "--simreg-lambda") or "0") or objective == "none" or ":" in objective


def _is_zero(weight: str) -> bool:
    return re.fullmatch(r"0*\.?0*(e[+-]?\d+)?", weight, re.IGNORECASE) is not None


def _without_idle_chunks(preset: list[Flag], user: Sequence[Flag]) -> list[Flag]:
    """Drop the tiny presets' chunk size if no objective has chunks: the plugin refuses settings without effect."""
    from simreg_megatron.config import SimRegConfig  # not where a cluster's own Python keeps the books of a chain

    has_chunks = _simreg_asked(user)
    if has_chunks:
        objective = flag_value(user, "--simreg-objective") or "simreg"
        options = flag_value(user, "--simreg-objective-options") or ""
        with suppress(ValueError):  # the plugin says later what is wrong with them
            parts = SimRegConfig(objective=objective, objective_options=options).parts  # type: ignore[arg-type]
            has_chunks = any(part.has_chunks for part in parts)
    return preset if has_chunks else without(preset, {"--simreg-chunk-size"})


_OF_LONG_RUNS = (
    ("--cross-entropy-loss-fusion",),  # Megatron's own: fewer copies of the logits in fp32
    # Python collects garbage on all ranks in the same step, and not on one while the others wait for it.
    ("--manual-gc",),
    ("--manual-gc-interval", "100"),
    # Indexing a large text, or compiling, keeps the first rank from the others for longer than Megatron's 10 minutes.
    ("--distributed-timeout-minutes", "30"),
)


_OF_SHARDED_STATE = (  # of the optimizer, over the replicas; the numbers stay the same
    ("--use-distributed-optimizer",),
    ("--overlap-grad-reduce",),
    ("--overlap-param-gather",),
)
# Elements of a bucket of gradients. Megatron's own choice grows with the replicas, and it loads the optimizer's state
# into buckets as they were saved alone: of one size, a run goes on with any number of nodes. This is Megatron's for 128
# replicas, those of the 7B's layout.
_BUCKET = ("--ddp-bucket-size", "128000000")


def _hardware_flags(flags: Sequence[Flag], machine: Machine, *, on_cpu: bool, large: bool) -> list[Flag]:
    if on_cpu:
        from simreg_megatron.cpu.backend import MEGATRON_FLAGS

        return group_flags(MEGATRON_FLAGS)
    chosen: list[Flag] = [] if flag_names(flags) & _PRECISIONS else [("--bf16",)]
    if not machine.apex_gradient_kernel:
        chosen.append(("--no-gradient-accumulation-fusion",))
    if machine.transformer_engine:
        chosen.append(("--transformer-impl", "transformer_engine"))
        chosen.append(("--no-create-attention-mask-in-dataloader",))  # its kernels know the causal mask
        if "--num-experts" in flag_names(flags):
            # One kernel for all experts of a rank, and one to sort their tokens.
            chosen += [("--moe-grouped-gemm",), ("--moe-permute-fusion",)]
    else:
        if "--sequence-parallel" in flag_names(flags):
            raise LaunchError(
                "--sequence-parallel on GPUs needs Transformer Engine, which is not installed: "
                "pip install --no-build-isolation 'transformer-engine[pytorch]'"
            )
        # Megatron's local layers find these kernels in Apex or Transformer Engine only.
        fusions = ("--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-rope-fusion")
        chosen += [("--transformer-impl", "local"), *((flag,) for flag in fusions)]
    if large:
        chosen += _OF_LONG_RUNS
    if large and not flag_names(flags) & _FSDP:
        chosen += _OF_SHARDED_STATE
        chosen += [] if "--ddp-num-buckets" in flag_names(flags) else [_BUCKET]  # Megatron takes one of the two
    return chosen


def _data_flags(options: argparse.Namespace, corpus: Corpus, given: Sequence[Flag], *, builtin: bool) -> list[Flag]:
    if builtin:
        return [
            ("--train-data-path", str(corpus.train_prefix)),
            ("--valid-data-path", str(corpus.valid_prefix)),
            ("--tokenizer-type", "SentencePieceTokenizer"),
            ("--tokenizer-model", str(corpus.tokenizer_model)),
        ]
    flags: list[Flag] = []
    if options.valid_data:
        flags += [("--train-data-path", *options.data), ("--valid-data-path", *options.valid_data)]
    elif options.data:
        validates = flag_value(given, "--eval-iters") != "0"  # Megatron would look for a sample in the 1 %
        flags += [("--data-path", *options.data), ("--split", "99,1,0" if validates else "100,0,0")]
    if options.tokenizer:
        kind = "SentencePieceTokenizer" if options.tokenizer.endswith(".model") else "HuggingFaceTokenizer"
        flags += [("--tokenizer-type", kind), ("--tokenizer-model", options.tokenizer)]
    return flags


def _cache_flags(output: Path, *, builtin: bool) -> list[Flag]:
    """Keep the index of the samples with the run if the folder of the text is read-only, as in a shared clone."""
    is_shared = builtin and BUILTIN_CORPUS.is_dir() and not os.access(BUILTIN_CORPUS, os.W_OK)
    return [("--data-cache-path", str(output / "cache"))] if is_shared else []


def _default_output(family: str, model: str, user: Sequence[Flag], stamp: str) -> Path:
    """Where checkpoints go, ranks must agree: no clock in it. A tiny run only logs, from one rank."""
    output = Path("runs") / f"{family}-{model}-{re.sub(r'[^A-Za-z0-9.-]', '_', _named_objective(user))}"
    return output / stamp if model == TINY else output


def _named_objective(user: Sequence[Flag]) -> str:
    """Such as ce, simreg-10, simreg-auto-whole, sce-0.1: runs that train on something else have another folder."""
    if not _simreg_asked(user):
        return "ce"
    objective = flag_value(user, "--simreg-objective") or "simreg"
    if objective == "none":
        return "simreg-log"
    weight = flag_value(user, "--simreg-lambda")
    whole = "-whole" if flag_value(user, "--simreg-chunk-size") == "0" else ""
    return f"{objective}{f'-{weight}' if weight else ''}{whole}"


def _output_flags(output: Path, *, saves: bool) -> list[Flag]:
    flags: list[Flag] = [("--tensorboard-dir", str(output / "tensorboard"))]
    return [*flags, ("--save", str(output / "checkpoints"))] if saves else flags


def _choose_script(environ: Mapping[str, str], user: Sequence[Flag]) -> Path:
    tree = environ.get("MEGATRON_PATH")
    if not tree:
        if unread := sorted(flag_names(user) & _READ_BY_PRETRAIN_GPT):
            raise LaunchError(
                f"{unread[0]} is read by Megatron-LM's own pretrain_gpt.py alone: set MEGATRON_PATH to a Megatron-LM "
                "tree, or start `torchrun -m simreg_megatron pretrain_gpt.py` with your flags"
            )
        return _OWN_SCRIPT
    script = Path(tree).absolute() / "pretrain_gpt.py"
    if not script.is_file():
        raise LaunchError(f"MEGATRON_PATH={tree} has no pretrain_gpt.py: name a Megatron-LM source tree or unset it")
    return script


def _environment(flags: Sequence[Flag], *, on_cpu: bool) -> dict[str, str]:
    """Defaults for the run; what the user has set stays."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false"  # Hugging Face's threads do not survive the data loader's fork
    }
    if not flag_names(flags) & _FSDP:  # which refuses it
        # One hardware queue: Megatron relies on its order to overlap communication with matrix products. That of
        # experts overlaps in several alone; under TP or CP the two are at odds, and Megatron itself says so.
        tensor, _, context = sizes.model_parallel_sizes(flags)
        in_several = _OVERLAPS_EXPERTS in flag_names(flags) and tensor == context == 1
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32" if in_several else "1"
    if on_cpu:
        environment["SIMREG_CPU"] = "1"  # read before Megatron is imported
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiled graphs would bypass the stand-ins for CUDA
    return environment
