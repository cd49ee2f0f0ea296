# SPDX-License-Identifier: Apache-2.0
"""The cells of the parity table: one line each, a layout and an objective that must equal the single process.

The sequence has 64 tokens. Chunks of 16 lie inside every rank's block in all layouts; a chunk of 24 spans ranks, and
the last one is shorter; 0 is the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simreg_megatron.objectives import Objective, find
from tests.megatron.runs import SIMREG


@dataclass(frozen=True)
class Part:
    """Some of Megatron's or SimReg's flags under the name that the table prints; parts add up."""

    name: str
    flags: tuple[str, ...] = ()
    processes: int = 1

    def __add__(self, other: Part) -> Part:
        name = f"{self.name} {other.name}".strip()
        return Part(name, (*self.flags, *other.flags), self.processes * other.processes)


def part(name: str, flags: str = "", processes: int = 1) -> Part:
    return Part(name, tuple(flags.split()), processes)


@dataclass(frozen=True)
class Bound:
    """Largest relative differences that pass: of losses, gradient norms, any parameter's gradient, any value logged."""

    loss: float
    norm: float
    grad: float
    logged: float = 1e-4


@dataclass(frozen=True)
class Cell:
    """One row: `layout` with `objective` against `reference`, which is one process with the same objective."""

    layout: Part
    objective: Part
    model: str = "dense"  # a key of runs.MODELS
    mode: Part = field(default_factory=lambda: part(""))  # flags that the reference has too
    reference: Part = field(default_factory=lambda: part("1 process"))
    reference_objective: Part | None = None
    oracle: str = ""  # function of oracles.py applied to the reference
    breakage: str = ""  # function of breakage.py applied to the row
    setting: str = ""  # function of oracles.py applied to both sides
    must_fail: str = ""  # why the row must miss its bound; empty for all others
    bound: Bound = Bound(1e-6, 1e-5, 1e-5)
    core: bool = False  # part of the quick tests

    @property
    def name(self) -> str:
        words = [self.model, self.layout.name, self.objective.name, self.mode.name]
        if self.reference.name != "1 process" or self.oracle or self.must_fail:
            words.append(f"vs {self.oracle.replace('_', ' ') or self.reference.name}")
        words += [patch.replace("_", " ") for patch in (self.setting, self.breakage)]
        return ", ".join(word for word in words if word)

    @property
    def processes(self) -> int:
        return self.layout.processes


# Layouts -----------------------------------------------------------------------------------------------------------
ONE = part("1 process")
TP2 = part("TP2", "--tensor-model-parallel-size 2", 2)
SP = part("SP", "--sequence-parallel")
CP2 = part("CP2", "--context-parallel-size 2", 2)
CP4 = part("CP4", "--context-parallel-size 4", 4)
PP2 = part("PP2", "--pipeline-model-parallel-size 2", 2)
VPP2 = part("VPP2", "--num-virtual-stages-per-pipeline-rank 2")
DP2 = part("DP2", "", 2)
EP2 = part("EP2", "--expert-model-parallel-size 2", 2)
ETP1 = part("ETP1", "--expert-tensor-parallel-size 1")
ETP2 = part("ETP2", "--expert-tensor-parallel-size 2")
DISTRIBUTED = part("distributed optimizer", "--use-distributed-optimizer")
OVERLAP_GRADS = part("overlapped reduce", "--overlap-grad-reduce")
OVERLAP_PARAMS = part("overlapped gather", "--overlap-param-gather")
OVERLAPPED = DISTRIBUTED + OVERLAP_GRADS + OVERLAP_PARAMS
ALLGATHER = part("allgather dispatcher", "--moe-token-dispatcher-type allgather")
HALF = part("micro-batch 1", "--micro-batch-size 1")
DOUBLE = part("micro-batch 4", "--micro-batch-size 4")
BF16 = part("bf16", "--bf16")
FP16 = part("fp16 scale 1024", "--fp16 --loss-scale 1024")
FP16_DYNAMIC = part("fp16 growing scale", "--fp16 --initial-loss-scale 1024 --loss-scale-window 1")
FULL = part("full recompute", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
SELECTIVE = part("selective recompute", "--recompute-granularity selective")
FUSED_CE = part("native CE fusion", "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native")
SCHEDULE_PLAN = part("schedule plan", "--overlap-moe-expert-parallel-comm")
FSDP2 = part("torch FSDP2", "--use-torch-fsdp2")
RERUN = part("rerun validates", "--rerun-mode validate_results")

# Objectives --------------------------------------------------------------------------------------------------------
_SIMREG = Part("", SIMREG)
OFF = part("off")


def chunk(size: int, more: str = "", name: str = "") -> Part:
    return _SIMREG + part(f"chunk {size}" if size else "whole", f"--simreg-chunk-size {size}") + part(name, more)


INSIDE, ACROSS, WHOLE = chunk(16), chunk(24), chunk(0)
HALVES = chunk(32)


def weighted(size: int, weight: str) -> Part:
    return chunk(size, f"--simreg-chunk-weight {weight}", weight)


def baseline(name: str, size: int | None = None, options: str = "") -> Part:
    chunks = "" if size is None else f"--simreg-chunk-size {size}"
    named = f"{name} {options}".strip() + ("" if size is None else f" chunk {size}" if size else " whole")
    flags = f"--simreg-objective {name} {chunks}" + (f" --simreg-objective-options {options}" if options else "")
    return _SIMREG + part(named, flags)


def neighbour(name: str, weight: str, size: int | None = None, options: str = "") -> Part:
    """Another objective that has no temperature, or whose terms need a weight of their own to show."""
    made = baseline(name, size, options)
    return Part(made.name, ("--simreg-lambda", weight, *made.flags[len(SIMREG) :]))


def similarity(name: str, temperature: int, more: str = "") -> Part:
    return chunk(24, f"--simreg-similarity {name} --simreg-temperature {temperature} {more}", name)


def local(size: int) -> Part:
    return chunk(size, "--simreg-scope local", "local")


# What both sides share -----------------------------------------------------------------------------------------------
MASKED = part("masked ends", "--eod-mask-loss")
PER_TOKEN = part("per token, masked ends", "--calculate-per-token-loss --eod-mask-loss")
DOCUMENTS = part("documents", "--eod-mask-loss --reset-position-ids --reset-attention-mask")
CHATS = (  # with --sft, whose validation set is not to be empty
    part("packed chats", "--eval-iters 1"),
    part("packed chats per token", "--eval-iters 1 --calculate-per-token-loss"),
)

# Half precision rounds every activation to 8 (bf16) or 11 (fp16) bits and adds them up in another order in each layout,
# Megatron's own loss alike. These rows hold the plumbing (loss scale, dtypes, casts): a factor of two still shows.
# The log has their spread, too, which behind an RMSNorm is no larger than the rounding of a norm in bf16.
_BF16_BOUND = Bound(2e-3, 2e-2, 5e-2, 3e-1)
_FP16_BOUND = Bound(5e-4, 5e-3, 1e-2, 1e-1)

_CHUNKS = [
    Cell(TP2, INSIDE),
    Cell(TP2, WHOLE),
    Cell(TP2 + SP, INSIDE),
    Cell(TP2 + SP, ACROSS, core=True),
    Cell(TP2 + SP, WHOLE),
    Cell(CP2, INSIDE),
    Cell(CP2, ACROSS),
    Cell(CP2, WHOLE, core=True),
    Cell(CP2 + TP2 + SP, INSIDE),
    Cell(CP2 + TP2 + SP, ACROSS),
    Cell(CP2 + TP2 + SP, WHOLE),
    Cell(PP2, INSIDE),
    Cell(PP2, ACROSS),
    Cell(PP2 + TP2 + SP, ACROSS),
    Cell(PP2 + CP2, WHOLE),
    Cell(PP2 + VPP2, ACROSS, model="deep"),
    Cell(DP2, INSIDE),
    Cell(DP2, WHOLE),
    Cell(DP2 + TP2 + SP, ACROSS),
    Cell(DP2 + CP2, ACROSS),
]
_OPTIMIZERS = [
    Cell(DP2 + DISTRIBUTED, ACROSS),
    Cell(DP2 + OVERLAP_GRADS, ACROSS),
    Cell(DP2 + OVERLAPPED, ACROSS),
    Cell(CP2 + DISTRIBUTED, ACROSS),
    Cell(TP2 + SP + DP2 + OVERLAPPED, ACROSS),
    Cell(DP2 + FSDP2, ACROSS, core=True),
    Cell(DP2 + FSDP2, OFF, mode=PER_TOKEN, must_fail="Megatron leaves out the division by tokens"),
    Cell(CP2 + FSDP2, ACROSS),
    Cell(TP2 + SP + DP2 + FSDP2, ACROSS),
    Cell(HALF, ACROSS),
    Cell(DOUBLE, ACROSS),
    Cell(DP2 + HALF, ACROSS),
]
_SCOPES = [
    Cell(TP2 + SP, local(32), reference_objective=HALVES),
    Cell(TP2 + SP, local(0), reference_objective=HALVES),
    Cell(CP2, local(16), reference_objective=INSIDE),
    Cell(CP2, local(0), reference_objective=INSIDE),
]
_LEARNABLE = similarity("learnable", 4, "--dist-ckpt-strictness log_all")  # the checkpoints are without its scalars
_OBJECTIVES = [
    Cell(TP2 + SP, similarity("dot", 32)),
    *(Cell(layout, similarity(name, 4)) for name in ("qnorm", "dnorm") for layout in (TP2 + SP, CP2, DP2)),
    Cell(TP2 + SP, _LEARNABLE, core=True),
    *(Cell(layout, _LEARNABLE) for layout in (TP2, PP2, CP2, DP2, DP2 + DISTRIBUTED, HALF)),
    # With a tied embedding or MTP the scalars have a bucket of their own on the last stage, to wait for.
    *(Cell(PP2 + DP2 + OVERLAPPED, _LEARNABLE, model=model) for model in ("tied", "mtp")),
    Cell(CP2, chunk(24, "--simreg-group-reduce mean", "group mean")),
    Cell(TP2 + SP, chunk(0, "--simreg-self-positive never", "self never")),
]
_WEIGHTS = [
    Cell(layout, weighted(24, weight), mode=mode, core=(layout, weight) == (TP2 + SP, "count-corrected"))
    for layout, mode in ((TP2 + SP, MASKED), (CP2, PER_TOKEN))
    for weight in ("uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected")
]
_COUNTS = [
    *(Cell(layout, ACROSS, mode=PER_TOKEN) for layout in (DP2, TP2 + SP, PP2, HALF)),
    Cell(CP2, ACROSS, mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, ACROSS, mode=PER_TOKEN),
    Cell(TP2 + SP, ACROSS, mode=MASKED),
    Cell(DP2, ACROSS, mode=MASKED, reference=DOUBLE, oracle="data_ranks", core=True),
    Cell(DP2, ACROSS, mode=MASKED, reference=DOUBLE, must_fail="Megatron averages the ranks' means"),
    Cell(CP2, ACROSS, mode=MASKED, oracle="context_ranks", core=True),
    Cell(CP2, ACROSS, mode=MASKED, must_fail="Megatron averages the ranks' means"),
]
_SAMPLES = [
    Cell(TP2 + SP, ACROSS, setting="few_samples"),
    Cell(CP2 + TP2 + SP, ACROSS, mode=PER_TOKEN, setting="few_samples"),
    Cell(HALF, ACROSS, setting="few_samples", must_fail="another micro-batch, other positions"),
]
_DOCUMENTS = [
    Cell(layout, chunk(size, "--simreg-document-mask", "document mask"), mode=DOCUMENTS)
    for layout, size in ((TP2 + SP, 24), (TP2 + SP, 0), (PP2, 24), (DP2, 0))
]
_PACKED = [  # each sample is padded to a multiple of twice four ranks, and cut over them separately
    *(
        Cell(layout, chunk(size), mode=CHATS[1], setting="padded_samples", core=layout == CP2 and size > 0)
        for layout, size in (
            (CP2, 0), (CP2, 24), (CP4, 24), (CP2 + TP2, 0), (CP2 + TP2 + SP, 24), (PP2 + CP2, 24), (TP2 + SP, 24),
            (DP2, 16),
        )
    ),
    Cell(CP2, ACROSS, mode=CHATS[0], setting="padded_samples", oracle="context_ranks_of_samples"),
    Cell(
        CP2, ACROSS, mode=CHATS[1], oracle="padded_samples", breakage="samples_cut_as_one", must_fail="wrong on purpose"
    ),
]  # fmt: skip
_PRECISION = [
    Cell(ONE + BF16, ACROSS, bound=_BF16_BOUND),
    Cell(TP2 + SP + BF16, ACROSS, bound=_BF16_BOUND),
    Cell(CP2 + BF16, ACROSS, bound=_BF16_BOUND),
    Cell(ONE + FP16, ACROSS, bound=_FP16_BOUND),
    Cell(TP2 + SP + FP16, ACROSS, bound=_FP16_BOUND),
    Cell(ONE + FP16_DYNAMIC, ACROSS, bound=_FP16_BOUND),
    Cell(TP2 + SP + FP16_DYNAMIC, ACROSS, bound=_FP16_BOUND),
]
_RECOMPUTE = [
    Cell(ONE + FULL, ACROSS),
    Cell(TP2 + SP + FULL, ACROSS),
    Cell(ONE + SELECTIVE, ACROSS),
    Cell(TP2 + SP + SELECTIVE, ACROSS),
    # Megatron's fused cross entropy rounds its gradient to bf16: fp32 is no reference for it.
    Cell(TP2 + FUSED_CE, ACROSS, reference=FUSED_CE),
    Cell(TP2 + SP + FUSED_CE, ACROSS, reference=FUSED_CE),
    Cell(TP2 + SP + RERUN, ACROSS),
]
_MODELS = [
    Cell(TP2, ACROSS, model="tied"),
    Cell(PP2, ACROSS, model="tied", core=True),
    Cell(TP2 + SP, ACROSS, model="gqa"),
    Cell(CP2, ACROSS, model="gqa"),
    Cell(TP2 + SP, ACROSS, model="mtp", core=True),
    Cell(CP2, ACROSS, model="mtp", mode=part("MTP weight 0", "--mtp-loss-scaling-factor 0")),
    Cell(CP2, OFF, model="mtp", must_fail="Megatron averages its MTP loss over ranks"),
    Cell(PP2, ACROSS, model="mtp"),
]
_EXPERTS = [
    Cell(EP2, ACROSS, model="moe", core=True),
    Cell(EP2 + ALLGATHER, ACROSS, model="moe"),
    Cell(EP2 + TP2 + SP + ETP1, ACROSS, model="moe"),
    Cell(EP2 + TP2 + SP + ALLGATHER, ACROSS, model="moe"),
    Cell(TP2 + SP + ETP1, ACROSS, model="moe"),
    Cell(TP2 + SP + ETP2, ACROSS, model="moe"),
    Cell(EP2 + PP2, ACROSS, model="moe"),
    Cell(CP2, WHOLE, model="moe"),
    Cell(EP2 + DISTRIBUTED, ACROSS, model="moe"),
    Cell(EP2 + BF16 + SCHEDULE_PLAN, ACROSS, model="moe", reference=EP2 + BF16),
    Cell(EP2 + BF16 + SCHEDULE_PLAN, ACROSS, model="moe", reference=ONE + BF16, bound=_BF16_BOUND),
]
_INNER = [
    Cell(TP2, chunk(24, "--simreg-layers 1,final", "layers 1,final")),
    Cell(TP2 + SP, chunk(24, "--simreg-layers 1", "layer 1")),
    Cell(CP2, chunk(0, "--simreg-layers 1,final --simreg-placement pre-norm", "layers 1,final pre-norm")),
    Cell(DP2, chunk(24, "--simreg-layers 1", "layer 1"), mode=PER_TOKEN),
    Cell(PP2 + VPP2, chunk(24, "--simreg-placement pre-norm", "pre-norm"), model="deep"),
    Cell(TP2 + SP + SELECTIVE, chunk(24, "--simreg-layers 1", "layer 1")),
    Cell(TP2 + SP + FULL, chunk(24, "--simreg-placement pre-norm", "pre-norm")),
    Cell(EP2, chunk(24, "--simreg-layers 1,final", "layers 1,final"), model="moe"),
]
_TOGETHER = Part(
    "simreg:10,sigreg:0.3,sce:1",
    ("--simreg-objective", "simreg:10,sigreg:0.3,sce:1", "--simreg-temperature", "0.5", "--simreg-chunk-size", "24"),
)
_LATE = chunk(24, "--simreg-layers 3,final", "layers 3,final")
_LAYERS = [  # of the stage that computes the loss
    Cell(PP2, _LATE, model="deep", core=True),
    Cell(PP2, _LATE, model="deep", mode=MASKED),
    Cell(PP2 + TP2 + SP, _LATE, model="deep", mode=PER_TOKEN),
    Cell(PP2 + CP2, chunk(0, "--simreg-layers 3,final", "layers 3,final"), model="deep"),
    Cell(PP2 + FULL, _LATE, model="deep"),
    Cell(PP2, _TOGETHER + part("layers 3,final", "--simreg-layers 3,final"), model="deep", mode=PER_TOKEN),
    Cell(TP2 + SP + FULL, chunk(24, "--simreg-layers 1,2,3,4,final", "layers 1,2,3,4,final"), model="deep"),
]
_BASELINES = [
    Cell(TP2, baseline("creg", 24)),
    Cell(CP2 + TP2 + SP, baseline("creg", 0, "form=supcon_out,self_positive=always")),
    Cell(PP2, baseline("creg", 16, "form=per_pair")),
    Cell(TP2 + SP, baseline("sce", 24)),
    Cell(CP2, baseline("sce", 0, "exclude_self=yes,coupling=0.7"), mode=PER_TOKEN),
    Cell(TP2 + SP, baseline("cpretrain", 24)),
    Cell(CP2, baseline("cpretrain", 0), mode=PER_TOKEN),
    Cell(TP2, baseline("simcse")),
    Cell(TP2 + SP, baseline("simcse"), mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, baseline("simcse")),
    Cell(TP2 + SP, baseline("simcse", options="view=dropout")),
    Cell(CP2, baseline("simcse", options="view=dropout,pooling=last"), mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, baseline("simcse", options="pooling=last")),
    Cell(TP2 + SP, baseline("cpretrain", options="level=sequence")),
    Cell(CP2, baseline("cpretrain", options="level=sequence")),
    Cell(DP2, baseline("simcse", options="gather=yes"), reference=DOUBLE, core=True),
    Cell(DP2, baseline("simcse"), reference=DOUBLE, must_fail="each rank compares its own sequences"),
    Cell(TP2 + SP + DP2, baseline("simcse", options="gather=yes,view=dropout"), reference=DOUBLE),
    Cell(CP2 + DP2, baseline("simcse", options="gather=yes,pooling=last"), reference=DOUBLE, mode=PER_TOKEN),
    Cell(EP2, baseline("sce", 24), model="moe"),
    Cell(DP2 + DISTRIBUTED, baseline("simcse")),
]
_SUMS = [
    Cell(TP2 + SP, neighbour("sigreg", "0.3", 24)),
    Cell(TP2, neighbour("sigreg", "0.02", 24, "estimator=epps-pulley,directions=32")),
    Cell(CP2, neighbour("sigreg", "0.3", 0), mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, neighbour("sigreg", "0.3", options="sample=micro-batch")),
    Cell(PP2, neighbour("sigreg", "0.3", 24)),
    Cell(EP2, neighbour("sigreg", "0.3", 24), model="moe"),
    Cell(HALF, neighbour("sigreg", "0.3", 24)),
    Cell(DP2, neighbour("sigreg", "0.3", options="sample=replicas"), reference=DOUBLE, core=True),
    Cell(
        DP2,
        neighbour("sigreg", "0.3", options="sample=micro-batch"),
        reference=DOUBLE,
        must_fail="each rank has a sample of its own",
    ),
]
_MOMENTS = [
    Cell(TP2 + SP, neighbour("mic", "0.02", 24)),
    Cell(CP2, neighbour("mic", "0.02", options="pool=token,prefixes=8/32"), mode=PER_TOKEN),
    Cell(TP2, neighbour("mic", "0.02", options="pool=sequence,norm_scope=batch")),
    Cell(CP2 + TP2 + SP, neighbour("mic", "0.02", 16), mode=PER_TOKEN),
    Cell(PP2, neighbour("mic", "0.02", 24)),
    Cell(DP2 + DISTRIBUTED, neighbour("mic", "0.02", 24)),
    Cell(TP2 + SP, chunk(24, "--simreg-objective-options prefixes=16/64", "prefixes 16/64")),
    Cell(CP2, chunk(0, "--simreg-objective-options prefixes=8/16", "prefixes 8/16")),
]
_COMBINATIONS = [
    Cell(HALF, _TOGETHER),
    Cell(TP2 + SP, _TOGETHER, core=True),
    Cell(CP2, _TOGETHER, mode=PER_TOKEN),
    Cell(PP2, _TOGETHER),
]
_HEADS = neighbour("sigmoid", "0.1", 24, "pairs=hidden-head,pair_reduction=balanced,trains=none")
_PAIRS = [
    Cell(TP2 + SP, neighbour("sigmoid", "0.1", 24, "pair_reduction=balanced,trains=none")),
    Cell(PP2, neighbour("sigmoid", "0.1", 24, "pair_reduction=balanced,trains=none")),
    Cell(DP2, neighbour("sigmoid", "0.1", 24, "pair_reduction=balanced,trains=none")),
    Cell(TP2, neighbour("sigmoid", "0.003", 24, "trains=none,param=absolute")),
    Cell(CP2, neighbour("sigmoid", "0.1", 0, "pair_reduction=pair,trains=none"), mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, neighbour("sigmoid", "0.1", 24, "pair_reduction=balanced,trains=none"), mode=PER_TOKEN),
    Cell(TP2, _HEADS),
    Cell(TP2 + SP, _HEADS),
    Cell(CP2, _HEADS, mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, _HEADS),
    Cell(PP2, _HEADS, model="tied"),
]
_PLACEBO = baseline("placebo", 24)
_ENDING = "--simreg-lambda-schedule cosine:0.2 --simreg-off-after 0.67"  # on in two of the three steps
_CONTROLS = [
    *(Cell(layout, _PLACEBO) for layout in (TP2, TP2 + SP, DP2, HALF)),
    Cell(CP2, _PLACEBO, mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, baseline("placebo", 0)),
    Cell(PP2, _PLACEBO + part("layers 3,final", "--simreg-layers 3,final"), model="deep", mode=MASKED),
    Cell(TP2 + SP, chunk(24, _ENDING, "schedule")),
    Cell(PP2, chunk(24, f"--simreg-layers 3,final {_ENDING}", "layers 3,final, schedule"), model="deep"),
    Cell(DP2 + OVERLAP_GRADS, _LEARNABLE + part("schedule", _ENDING)),
    Cell(DP2, _TOGETHER + part("schedule", _ENDING)),
]
_Z_LOSS = neighbour("z-loss", "0.05")
_NORMALIZERS = [
    Cell(TP2, _Z_LOSS, model="tied"),
    Cell(TP2 + SP, _Z_LOSS, mode=PER_TOKEN),
    Cell(CP2, _Z_LOSS, mode=PER_TOKEN),
    Cell(PP2, _Z_LOSS),
    Cell(DP2 + DISTRIBUTED, _Z_LOSS),
    Cell(TP2, _Z_LOSS, breakage="vocabulary_not_gathered", must_fail="wrong on purpose"),
]


def cells_of(objective: Objective) -> tuple[Cell, ...]:
    """Return cells for an objective that comes with its record alone, with its test settings."""
    example = objective.example
    made = neighbour(objective.name, f"{example.weight:g}", example.chunk_size, example.options)
    return tuple(
        Cell(layout, made, mode=mode)
        for layout, mode in (
            (TP2, part("")),
            (TP2 + SP, PER_TOKEN),
            (CP2, PER_TOKEN),
            (CP2 + TP2 + SP, part("")),
            (PP2, part("")),
            (DP2 + DISTRIBUTED, part("")),
            (HALF, part("")),
        )
    )


_SAMPLED = (
    *cells_of(find("dispersion")),
    Cell(CP2, neighbour("dispersion", "10", options="clamp=0.1") + part("layers 1,final", "--simreg-layers 1,final")),
)
LOCAL_MEANS = Cell(CP2, ACROSS, mode=PER_TOKEN, breakage="local_means_logged", must_fail="wrong on purpose")
TRUNCATED = neighbour("prefixes-ce", "0.5", options="prefixes=8/32")
_TRUNCATED = [
    Cell(TP2, TRUNCATED),
    Cell(TP2 + SP, TRUNCATED, mode=PER_TOKEN, core=True),
    Cell(CP2, TRUNCATED, mode=PER_TOKEN),
    Cell(CP2 + TP2 + SP, TRUNCATED),
    Cell(PP2, TRUNCATED),
    Cell(HALF, TRUNCATED),
    Cell(DP2 + DISTRIBUTED, TRUNCATED, core=True),
    Cell(TP2 + SP + DP2 + OVERLAPPED, TRUNCATED),
    Cell(TP2, TRUNCATED, model="tied"),
    Cell(PP2, TRUNCATED, model="tied"),
    Cell(TP2 + SP, TRUNCATED, model="mtp"),
    Cell(TP2 + SP + BF16, TRUNCATED, bound=_BF16_BOUND),
    Cell(EP2 + BF16 + SCHEDULE_PLAN, TRUNCATED, model="moe", reference=EP2 + BF16),
    Cell(TP2, TRUNCATED, breakage="vocabulary_not_gathered", must_fail="wrong on purpose"),
    Cell(TP2 + SP, TRUNCATED, breakage="vocabulary_not_gathered", must_fail="wrong on purpose"),
    Cell(TP2 + SP, TRUNCATED, breakage="halved_weight_gradient", must_fail="wrong on purpose"),
    Cell(TP2, TRUNCATED, breakage="other_anchors_dropped", must_fail="wrong on purpose"),
]
_BROKEN = [
    Cell(TP2 + SP, ACROSS, breakage="doubled_scale", must_fail="wrong on purpose"),
    Cell(TP2 + SP + BF16, ACROSS, breakage="doubled_scale", must_fail="wrong on purpose", bound=_BF16_BOUND),
    Cell(DP2, ACROSS, breakage="shifted_labels", must_fail="wrong on purpose"),
    Cell(PP2, WHOLE, breakage="flattened_batch", must_fail="wrong on purpose"),
    Cell(TP2 + SP, ACROSS, mode=PER_TOKEN, breakage="masked_tokens_kept", must_fail="wrong on purpose"),
    Cell(TP2 + SP, WHOLE, breakage="other_ranks_dropped", must_fail="wrong on purpose", core=True),
    Cell(CP2, ACROSS, breakage="other_ranks_dropped", must_fail="wrong on purpose"),
    Cell(TP2, WHOLE, breakage="shared_work_not_summed", must_fail="wrong on purpose"),
    LOCAL_MEANS,
]
CELLS = (
    *_CHUNKS, *_OPTIMIZERS, *_SCOPES, *_OBJECTIVES, *_WEIGHTS, *_COUNTS, *_SAMPLES, *_DOCUMENTS, *_PACKED, *_PRECISION,
    *_RECOMPUTE, *_MODELS, *_EXPERTS, *_INNER, *_LAYERS, *_BASELINES, *_SUMS, *_MOMENTS, *_PAIRS, *_COMBINATIONS,
    *_SAMPLED, *_TRUNCATED, *_NORMALIZERS, *_CONTROLS, *_BROKEN,
)  # fmt: skip
