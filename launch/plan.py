# SPDX-License-Identifier: Apache-2.0
"""Choose what would run, from what was asked and what machine this is: a pure function, `build_plan`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import preflight, sizes
from launch.flags import Flag, LaunchError, flag_names, flag_value, group_flags, read_preset, without
from launch.options import PRESETS, RECIPES, TINY, read_layout
from launch.planned import OWN_SCRIPT, ROOT, Machine, Plan

PATTERN = "--hybrid-layer-pattern"  # Megatron's: then it builds a HybridModel, a GPTModel otherwise
BUILTIN_CORPUS = ROOT / "data" / "builtin"
_OWN_DATA = {"--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data"}
_FSDP = {"--use-torch-fsdp2", "--use-megatron-fsdp"}
_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
_RESUMABLE = "a run that can resume (--auto-resume, and every submitted one)"


def build_plan(
    family: str,
    options: argparse.Namespace,
    user_words: Sequence[str],
    machine: Machine,
    *,
    environ: Mapping[str, str],
    stamp: str = "TIME",
) -> Plan:
    """Choose every flag of the run; the user's own come last and replace the preset's.

    `options` and `user_words` are what `make_parser(family)` read and did not know; of `environ`, MEGATRON_PATH and
    SIMREG_CPU are read; `stamp` names the output folder of a tiny run. A LaunchError if it cannot start as asked.
    """
    asked = group_flags(re.sub("^--persistent-save-interval", "--save-interval", word) for word in user_words)
    _refuse_contradictions(options, asked)
    user = [*without(group_flags(RECIPES.get(options.recipe, ())), flag_names(asked)), *asked]
    model, large = options.model, options.model != TINY
    on_cpu = _choose_cpu(model, user, machine, environ)
    builtin = _uses_builtin_corpus(model, options, user)
    preset = read_preset(PRESETS / f"{family}-{model}.args")
    if options.layout:
        spread = without(read_layout(options.layout, family, model), {"--nodes"})  # the job's to keep
        preset = [*without(preset, flag_names(spread)), *spread]
    preset, size_notes = sizes.fit_preset(preset, user, options.ffn, machine, strict=large)
    both = [*preset, *user]
    output = options.output or _default_output(family, model, user, stamp)
    chosen = [
        *_without_idle_chunks(preset, user),
        *_hardware_flags(both, machine, on_cpu=on_cpu, large=large),
        *_data_flags(options, both, output, builtin=builtin),
        ("--tensorboard-dir", str(output / "tensorboard")),
        *([("--save", str(output / "checkpoints"))] if _saves(options, both, user, model) else []),
    ]
    flags = (*without(chosen, flag_names(user)), *user)
    notes = list(size_notes)
    if not (options.recipe or options.plain or flag_names(asked) & {"--simreg-lambda", "--simreg-objective"}):
        notes.append(f"SimReg is off: add --simreg-lambda {'auto or --recipe paper' if large else 1} to train with it")
    if large and not on_cpu and not machine.transformer_engine:
        notes.append(
            "Transformer Engine is not installed: Megatron's own layers are slower and keep every score of attention, "
            f"so a micro-batch that fits with it may run out of memory ({_TE})"
        )
    preflight.check_own_flags(flags)
    return Plan(
        family=family, model=model, script=_choose_script(environ, flags), flags=flags, on_cpu=on_cpu,
        environment=_environment(flags, on_cpu=on_cpu), builtin_corpus=builtin, output=output,
        notes=tuple(notes), plain=options.plain,
    )  # fmt: skip


def _refuse_contradictions(options: argparse.Namespace, asked: Sequence[Flag]) -> None:
    """Refuse flags that contradict each other, or that make another recipe; all others win over the recipe's."""
    recipe, objective = options.recipe, flag_value(asked, "--simreg-objective")
    weight, chunk_size = flag_value(asked, "--simreg-lambda"), flag_value(asked, "--simreg-chunk-size")
    trains = recipe != "baseline"
    contradictions = {
        "--simreg-objective": objective not in (None, recipe if trains else "none"),
        "--simreg-lambda": weight is not None and _is_zero(weight) == trains,
        "--simreg-chunk-size": recipe == "paper-full" and chunk_size not in (None, "0"),
    }
    for name, contradicts in contradictions.items():
        if recipe and contradicts:
            raise LaunchError(f"--recipe {recipe} decides {name}: leave one of them out")
    plugin = [name for name in flag_names(asked) if name.startswith(("--simreg-", "--adagc"))]
    plugin += ["--recipe"] if recipe else []
    if options.plain and plugin:
        raise LaunchError(f"--plain leaves the plugin out, and {min(plugin)} is the plugin's: leave one of them out")
    if "--no-load-optim" in flag_names(asked) and not flag_names(asked) & {"--load", "--pretrained-checkpoint"}:
        raise LaunchError("--no-load-optim needs --load FOLDER and a new --output: a resume loads its own state")


def _saves(options: argparse.Namespace, flags: Sequence[Flag], user: Sequence[Flag], model: str) -> bool:
    """Return whether the run saves: every real size does, and a tiny one that is asked to."""
    interval, names = "--save-interval", flag_names(flags)
    asked, resumes = interval in flag_names(user), options.auto_resume
    if model == TINY and not options.output and "--save" not in names and (resumes or asked):
        raise LaunchError(f"{_RESUMABLE if resumes else interval} needs --output DIR: each tiny run has one of its own")
    if resumes and "--non-persistent-save-interval" in names:
        raise LaunchError(f"{_RESUMABLE} does so from --save: leave --non-persistent-save-interval out")
    if interval not in names and (resumes or flag_value(flags, "--save")):
        needs = f"{_RESUMABLE if resumes else '--save'} needs {interval} N"
        raise LaunchError(f"{needs}: nothing would be saved to resume from")
    return model != TINY or resumes or asked


def _choose_cpu(model: str, user: Sequence[Flag], machine: Machine, environ: Mapping[str, str]) -> bool:
    asked = "--simreg-cpu" in flag_names(user) or environ.get("SIMREG_CPU", "0") not in ("", "0")
    on_cpu = asked or not machine.gpus
    if not on_cpu and machine.local_world_size > machine.gpus:
        raise LaunchError(
            f"{machine.local_world_size} processes need as many GPUs, this machine has {machine.gpus}: "
            f"give torchrun --nproc-per-node {machine.gpus}"
        )
    if on_cpu and not asked and model != TINY:
        raise LaunchError(
            f"--model {model} needs a GPU and this machine has none: leave --model out for the tiny one, "
            "or insist with --simreg-cpu"
        )
    return on_cpu


def _uses_builtin_corpus(model: str, options: argparse.Namespace, user: Sequence[Flag]) -> bool:
    """Return whether nothing else was given to train on."""
    own = sorted(flag_names(user) & _OWN_DATA)
    texts = [*(["--data"] if options.data else []), *own]
    has_tokenizer = options.tokenizer or "--tokenizer-type" in flag_names(user)
    if options.data and own:
        raise LaunchError(f"{' and '.join(texts[:2])} both name the training text: give one")
    if options.valid_data and not options.data:
        raise LaunchError("--valid-data goes with --data PREFIX, the training text")
    if texts and not has_tokenizer:
        raise LaunchError(f"{texts[0]} needs --tokenizer PATH, the tokenizer that made it")
    if not texts and model != TINY:
        give = "give --data PREFIX (of PREFIX.bin and PREFIX.idx) and --tokenizer PATH"
        raise LaunchError(f"--model {model} needs your text: {give}")
    if not texts and has_tokenizer:
        raise LaunchError("--tokenizer goes with --data: the built-in corpus has its own tokenizer")
    return not texts


def _is_zero(weight: str) -> bool:
    return re.fullmatch(r"0*\.?0*(e[+-]?\d+)?", weight, re.IGNORECASE) is not None


def _without_idle_chunks(preset: list[Flag], user: Sequence[Flag]) -> list[Flag]:
    """Drop the tiny presets' chunk size if the plugin refuses it, as a setting without effect on the objective."""
    try:
        preflight.check_own_flags([*preset, *user])
    except ValueError:  # which is raised again if it has another reason
        return without(preset, {"--simreg-chunk-size"})
    return preset


_OF_LONG_RUNS = (
    ("--cross-entropy-loss-fusion",),  # Megatron's own: fewer copies of the logits in fp32
    # Python collects garbage on all ranks in the same step, and not on one while the others wait for it.
    ("--manual-gc",),
    ("--manual-gc-interval", "100"),
    # Indexing a large text, or compiling, keeps the first rank from the others for longer than Megatron's 10 minutes.
    ("--distributed-timeout-minutes", "30"),
)
# The optimizer's state is sharded over the replicas; the numbers stay the same.
_OF_SHARDED_STATE = (("--use-distributed-optimizer",), ("--overlap-grad-reduce",), ("--overlap-param-gather",))
# Elements of a bucket of gradients. Megatron's own choice grows with the replicas, and it loads the optimizer's state
# only into buckets as they were saved: of one size, a run resumes with any number of nodes. This is Megatron's for 128
# replicas, those of the 7B's layout.
_BUCKET = ("--ddp-bucket-size", "128000000")
_LOCAL_LAYERS = (  # their kernels for these are in Apex or Transformer Engine only
    ("--transformer-impl", "local"), ("--no-persist-layer-norm",), ("--no-masked-softmax-fusion",),
    ("--no-rope-fusion",),
)  # fmt: skip
_LOCAL_STACK = ("--spec", "simreg_megatron.cpu.hybrid", "LOCAL")


def _hardware_flags(flags: Sequence[Flag], machine: Machine, *, on_cpu: bool, large: bool) -> list[Flag]:
    names = flag_names(flags)
    pattern = flag_value(flags, PATTERN) or ""
    local_stack = [_LOCAL_STACK] if pattern else []
    if (on_cpu or not machine.transformer_engine) and set(pattern) - set("*-|"):
        raise LaunchError(
            f"{PATTERN} {pattern} has other layers than attention (*) and MLP (-), which need a GPU, Transformer "
            f"Engine ({_TE}) and, for Mamba (M), mamba-ssm and causal-conv1d: give a pattern of * and -"
        )
    if on_cpu:
        from simreg_megatron.cpu.backend import MEGATRON_FLAGS

        return [*group_flags(MEGATRON_FLAGS), *local_stack]
    chosen: list[Flag] = [] if names & {"--bf16", "--fp16"} else [("--bf16",)]
    if not machine.apex_gradient_kernel:
        chosen.append(("--no-gradient-accumulation-fusion",))
    if machine.transformer_engine:
        chosen.append(("--transformer-impl", "transformer_engine"))
        if flag_value(flags, "--transformer-impl") != "local":
            chosen.append(("--no-create-attention-mask-in-dataloader",))  # its kernels know the causal mask
        if "--num-experts" in names:  # one kernel for all experts of a rank, and one to sort their tokens
            chosen += [("--moe-grouped-gemm",), ("--moe-permute-fusion",)]
    elif "--sequence-parallel" in names:
        raise LaunchError(f"--sequence-parallel on GPUs needs Transformer Engine, which is not installed: {_TE}")
    else:
        chosen += [*_LOCAL_LAYERS, *local_stack]
    if large:
        chosen += without(_OF_LONG_RUNS, {"--cross-entropy-loss-fusion"} if "--deterministic-mode" in names else ())
    if large and not names & _FSDP:
        chosen += without(_OF_SHARDED_STATE, {"--overlap-param-gather"} if "--save-params-interval" in names else ())
        chosen += [] if "--ddp-num-buckets" in names else [_BUCKET]  # Megatron takes one of the two
    return chosen


def _data_flags(options: argparse.Namespace, given: Sequence[Flag], output: Path, *, builtin: bool) -> list[Flag]:
    stamped = options.model == TINY and not options.output  # by the clock, on which ranks may differ
    # Of the run: two that start on one text at once would write the same indices, and the text may be read-only.
    cache = ("--data-cache-path", str((output.parent if stamped else output) / "cache"))
    if builtin:
        flags: list[Flag] = [
            ("--train-data-path", str(BUILTIN_CORPUS / "train")),
            ("--valid-data-path", str(BUILTIN_CORPUS / "valid")),
            ("--tokenizer-type", "SentencePieceTokenizer"),
            ("--tokenizer-model", str(BUILTIN_CORPUS / "tokenizer.model")),
        ]
        if BUILTIN_CORPUS.is_dir() and not os.access(BUILTIN_CORPUS, os.W_OK):  # as in a shared clone
            flags.append(cache)
        return flags
    flags = [cache] if options.data else []
    if options.valid_data:
        flags += [("--train-data-path", *options.data), ("--valid-data-path", *options.valid_data)]
    elif options.data:
        validates = flag_value(given, "--eval-iters") != "0"  # Megatron would look for a sample in the 1 %
        flags += [("--data-path", *options.data), ("--split", "99,1,0" if validates else "100,0,0")]
    if options.tokenizer:
        kind = "SentencePieceTokenizer" if options.tokenizer.endswith(".model") else "HuggingFaceTokenizer"
        flags += [("--tokenizer-type", kind), ("--tokenizer-model", options.tokenizer)]
    return flags


def _default_output(family: str, model: str, user: Sequence[Flag], stamp: str) -> Path:
    """Name a folder that all ranks agree on: no clock in it, except for a tiny run, which logs from one rank only.

    Runs that train on something else have another one: ce, simreg-10, simreg-10-tau-0.1, simreg-auto-whole, sce-0.1.
    """
    name, weight = flag_value(user, "--simreg-objective") or "simreg", flag_value(user, "--simreg-lambda")
    if _is_zero(weight or "0") and name != "none" and ":" not in name:
        name = "ce"
    elif name == "none":
        name = "simreg-log"
    else:
        tau, chunk = (flag_value(user, f"--simreg-{option}") for option in ("temperature", "chunk-size"))
        cut = "whole" if chunk == "0" else chunk and f"chunk-{chunk}"
        name = "-".join(filter(None, (name, weight, tau and f"tau-{tau}", cut)))
    output = Path("runs") / f"{family}-{model}-{re.sub(r'[^A-Za-z0-9.-]', '_', name)}"
    return output / stamp if model == TINY else output


def _choose_script(environ: Mapping[str, str], flags: Sequence[Flag]) -> Path:
    tree = environ.get("MEGATRON_PATH")
    if not tree:
        return OWN_SCRIPT
    script = Path(tree).absolute() / f"pretrain_{'hybrid' if PATTERN in flag_names(flags) else 'gpt'}.py"
    if not script.is_file():
        raise LaunchError(f"MEGATRON_PATH={tree} has no {script.name}: name a Megatron-LM source tree or unset it")
    return script


def _environment(flags: Sequence[Flag], *, on_cpu: bool) -> dict[str, str]:
    """Return defaults for the run; variables that the user has set stay."""
    names = flag_names(flags)
    environment = {"TOKENIZERS_PARALLELISM": "false"}  # Hugging Face's threads do not survive the data loader's fork
    if not names & _FSDP:  # which refuses it
        # One hardware queue: Megatron relies on its order to overlap communication with matrix products. That of
        # experts overlaps in several only; under TP or CP the two are at odds, and Megatron itself says so.
        tensor, _, context = sizes.model_parallel_sizes(flags)
        in_several = "--overlap-moe-expert-parallel-comm" in names and tensor == context == 1
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32" if in_several else "1"
    if on_cpu:
        environment["SIMREG_CPU"] = "1"  # read before Megatron is imported
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiled graphs would bypass the stand-ins for CUDA
    return environment
