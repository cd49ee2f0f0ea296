# SPDX-License-Identifier: Apache-2.0
"""Write the text of --dry-run: what would run, and the command that can be pasted."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from importlib import metadata

from launch import data, preflight, sizes
from launch.flags import flag_number, flag_value
from launch.planned import ROOT, Machine, Plan, python_path
from simreg_megatron.objectives import note_on_lambda

BUILTIN_VOCABULARY = 4096
# torchrun's own names for its rendezvous; launch/start.bash fills them in for a dry run, which has no torchrun.
RENDEZVOUS = {f"PET_RDZV_{word}": f"--rdzv-{word.lower()}" for word in ("BACKEND", "ENDPOINT", "ID", "CONF")}
ASSUMED_VOCABULARY = 32000  # LLaMA-2's, where no manifest says it; Megatron asks the tokenizer


def describe(plan: Plan, machine: Machine, *, environ: Mapping[str, str], resumes: int | None = None) -> str:
    """Write facts as shell comments, then the command; `resumes` is the iteration of the checkpoint to resume from."""
    facts = facts_of(plan, machine) | {
        "megatron": megatron_version(environ),
        "script": str(plan.script),
        "output": str(plan.output),
    }
    lines = ["# Dry run: nothing is built or started."]
    lines += [f"# {name:<9} {value}" for name, value in facts.items()]
    lines += [] if resumes is None else [f"# resumes   from iteration {resumes}"]
    lines += [f"# note      {note}" for note in plan.notes]
    return "\n".join([*lines, command(plan, machine, environ=environ)])


def facts_of(plan: Plan, machine: Machine) -> dict[str, str]:
    """Describe what is trained, on what and how long: one line each."""
    vocabulary = vocabulary_of(plan)
    parameters = sizes.count_parameters(plan.flags, vocabulary=vocabulary)
    batch, sequence = (flag_number(plan.flags, name, 1) for name in ("--global-batch-size", "--seq-length"))
    steps, samples = flag_number(plan.flags, "--train-iters", 0), flag_number(plan.flags, "--train-samples", 0)
    length = f"{samples or steps:,} {'samples' if samples else 'steps'}"
    implementation = flag_value(plan.flags, "--transformer-impl")
    return {
        "model": f"{plan.family} {plan.model}, {parameters:,} parameters with a vocabulary of {vocabulary:,}",
        "tokens": f"{batch * sequence:,} per step, {length}, {tokens_of(plan):,} in all",
        "data": describe_data(plan),
        "simreg": describe_simreg(plan),
        "ranks": f"{machine.world_size} on {'the CPU' if plan.on_cpu else 'GPUs'}, layers: {implementation}",
    }


def vocabulary_of(plan: Plan) -> int:
    """Return the size of the vocabulary: as asked for, as the manifest of the text has it, or assumed."""
    known = (data.read_manifest(prefix).get("vocab_size", 0) for prefix in data.prefixes(plan.flags))
    assumed = BUILTIN_VOCABULARY if plan.builtin_corpus else ASSUMED_VOCABULARY
    return flag_number(plan.flags, "--vocab-size", next((size for size in known if size > 0), assumed))


def tokens_of(plan: Plan) -> int:
    """Count the tokens that the whole run reads."""
    batch, sequence = (flag_number(plan.flags, name, 1) for name in ("--global-batch-size", "--seq-length"))
    steps, samples = flag_number(plan.flags, "--train-iters", 0), flag_number(plan.flags, "--train-samples", 0)
    return (samples or steps * batch) * sequence


def describe_data(plan: Plan) -> str:
    """Describe the text, and how often the run reads it."""
    if plan.builtin_corpus:
        return "the built-in corpus (the run builds it, a dry run does not)"
    there, read = data.tokens_there(plan.flags), tokens_of(plan)
    return f"yours, {there:,} tokens, read {read / there:,.1f} times" if there and read > there else "yours"


def describe_simreg(plan: Plan) -> str:
    """Describe objective, lambda and chunks, with the number that auto stands for."""
    if plan.plain:
        return "left out, as is the whole plugin"
    config = preflight.check_own_flags(plan.flags)
    if not config.active:
        return "off"
    if not config.trains:
        return "measured, not trained on"
    hidden = flag_number(plan.flags, "--hidden-size", 1)
    auto = {part: " (auto)" if part.lambda_ == "auto" else "" for part in config.parts}
    objectives = ", ".join(f"{part.objective}, lambda {part.weight(hidden):g}{auto[part]}" for part in config.parts)
    notes = "".join(f" ({n})" for part in config.parts if (n := note_on_lambda(part.objective, part.lambda_, hidden)))
    if not any(part.record.compares_in_chunks(part.options) for part in config.parts):
        return f"{objectives}{notes}"
    chunks = f"chunks of {config.chunk_size} tokens" if config.chunk_size else "whole sequences"
    return f"{objectives}, {chunks}{notes}"


def command(plan: Plan, machine: Machine, *, environ: Mapping[str, str]) -> str:
    """Return the command that starts the same run without this launcher, one flag per line."""
    paths = [str(ROOT), *([environ["MEGATRON_PATH"]] if environ.get("MEGATRON_PATH") else [])]
    variables = {"PYTHONPATH": python_path(*reversed(paths), environ=environ), **plan.environment}
    variables.update({name: environ[name] for name in plan.environment if name in environ})
    start = [sys.executable, "-m", "torch.distributed.run", *_rendezvous(machine, environ)]
    parts = [
        ["env", *(f"{name}={value}" for name, value in variables.items())],
        start,
        ["-m", "simreg_megatron", *(["--plain"] if plan.plain else []), str(plan.script)],
        *(list(flag) for flag in plan.flags),
    ]
    return " \\\n  ".join(shlex.join(part) for part in parts)


def _rendezvous(machine: Machine, environ: Mapping[str, str]) -> list[str]:
    nodes = machine.world_size // machine.local_world_size
    processes = ["--nproc-per-node", str(machine.local_world_size)]
    meeting = {flag: environ[name] for name, flag in RENDEZVOUS.items() if name in environ}
    if nodes == 1 and not meeting:
        return ["--standalone", *processes]
    place = {"--nnodes": str(nodes), **meeting}
    if not meeting or "GROUP_RANK" in environ:  # a rendezvous of torchrun's may number the nodes itself
        place["--node-rank"] = environ.get("GROUP_RANK", "0")
    if not meeting:
        place["--master-addr"] = environ.get("MASTER_ADDR", "localhost")
        place["--master-port"] = environ.get("MASTER_PORT", "29500")
    return [*processes, *(word for pair in place.items() for word in pair)]


def megatron_version(environ: Mapping[str, str]) -> str:
    """Read the release that would run, without importing it."""
    if tree := environ.get("MEGATRON_PATH"):
        return f"of the source tree {tree}"
    try:
        return f"megatron-core {metadata.version('megatron-core')}"
    except metadata.PackageNotFoundError:
        return "not installed (make setup)"
