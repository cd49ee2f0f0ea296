# SPDX-License-Identifier: Apache-2.0
"""The functions to wrap, process groups and globals of each Megatron release. No other module knows releases."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

NEWEST_TRIED = (0, 19)  # benchmarks/results/versions.md
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # in the place of a process group of one rank
_GPT = "megatron.core.models.gpt.gpt_model"
_TRAINING = "megatron.training.training"


class MegatronSeamError(RuntimeError):
    """This Megatron lacks a function that the plugin must wrap, or a model does not call it."""


@dataclass(frozen=True)
class Seam:
    """One function of Megatron, and why the plugin needs it."""

    module: str
    owner: str | None  # a class inside the module, or None for a function of the module
    name: str
    purpose: str
    parameters: frozenset[str] = frozenset()
    called_by_keyword: bool = False  # then someone else's wrapper may take the parameters as **kwargs

    @property
    def path(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)

    def holder(self) -> Any:
        """Return the module or class whose attribute is to be replaced; MegatronSeamError if this Megatron lacks it."""
        cause, what, fix = None, f"it has no {self.path}", "use megatron-core 0.12 or newer"
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            cause, what = error, f"cannot import {self.module}: {error}"
            lacks = "megatron-core" if error.name == "megatron" else (error.name or "").partition(".")[0]
            if lacks not in ("", self.module.partition(".")[0]):  # up to 0.16 a source tree needs packages not named
                fix = f"install {lacks}"
        else:
            holder = module if self.owner is None else getattr(module, self.owner, None)
            if function := getattr(holder, self.name, None):
                taken = inspect.signature(function).parameters
                passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
                absent = self.parameters - set(taken)
                if not absent or (self.called_by_keyword and passes_on):
                    return holder
                what = f"{self.path} does not take {', '.join(sorted(absent))}"
        raise MegatronSeamError(
            f"SimReg cannot use megatron-core {megatron_version()} ({self.purpose}): {what}; {fix} (`simreg-megatron "
            "doctor` lists what was found)"
        ) from cause


_GIVEN = frozenset({"hidden_states", "labels", "loss_mask", "packed_seq_params", "inference_context"})
MODEL_SEAM = Seam(_GPT, "GPTModel", "_postprocess", "final hidden states and labels meet here", _GIVEN, True)
FORWARD_SEAMS = tuple(  # of models without a `_postprocess` of their own: the output of their decoder is caught
    Seam(module, owner, "forward", "it computes the loss", frozenset({"labels"}))
    for module, owner in (
        (_GPT, "GPTModel"),
        ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
        ("megatron.core.models.mamba.mamba_model", "MambaModel"),
    )
)
MASK_SEAMS = tuple(
    Seam(f"megatron.core.models.{module}", owner, name, "its loss mask is handed on to the language model inside")
    for module, owner, name in (
        ("multimodal.llava_model", "LLaVAModel", "_preprocess_data"),
        ("multimodal.llava_model", "LLaVAModel", "_process_embedding_token_parallel"),
        ("mimo.model.base", "MimoModel", "_shard_language_inputs"),
    )
)
DECODER_SEAM = Seam(
    "megatron.core.transformer.transformer_block", "TransformerBlock", "forward", "states inside the decoder are caught"
)
ARGUMENTS_SEAM = Seam("megatron.training.arguments", None, "add_megatron_arguments", "our flags join Megatron's")
SETUP_SEAM = Seam(_TRAINING, None, "setup_model_and_optimizer", "what cannot work is refused before step one")
STEP_SEAM = Seam(_TRAINING, None, "train_step", "a lambda that changes follows the iteration", frozenset({"model"}))
_LOGGED = frozenset({"total_loss_dict", "iteration", "skipped_iter"})
LOG_SEAM = Seam(_TRAINING, None, "training_log", "SimReg's values join Megatron's log", _LOGGED)
HELPERS_SEAM = Seam("megatron.core.datasets.utils", None, "compile_helpers", "wheels bring these helpers compiled")
_CHECKPOINTING = "megatron.training.checkpointing"
RESUME_SEAM = Seam(_CHECKPOINTING, None, "check_checkpoint_args", "a resume compares its flags with the checkpoint's")
_SCHEDULER = "megatron.core.optimizer_param_scheduler", "OptimizerParamScheduler"
SCHEDULER_SEAMS = tuple(
    Seam(*_SCHEDULER, name, "AdaGC's state is kept with the scheduler's in a checkpoint")
    for name in ("state_dict", "load_state_dict")
)


_signature = functools.lru_cache(maxsize=32)(inspect.signature)


def named_arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, also those that the function takes as **kwargs."""
    named: dict[str, Any] = {}
    for name, value in _signature(function).bind(*args, **kwargs).arguments.items():
        kind = _signature(function).parameters[name].kind
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def model_seams() -> tuple[Seam, ...]:
    """Return the functions in which models compute their loss, GPTModel's first; MegatronSeamError if it has none."""
    seams: list[Seam] = []
    for forward in FORWARD_SEAMS:
        with suppress(MegatronSeamError) if seams else nullcontext():  # only GPTModel is in every release
            # `_postprocess`, which schedule plans call without `forward`, or else `forward`, unless it is inherited.
            attributes, seam = vars(forward.holder()), replace(MODEL_SEAM, module=forward.module, owner=forward.owner)
            seam = seam if seam.name in attributes else forward
            if seam.name in vars(seam.holder()):
                seams.append(seam)
    return tuple(seams)


def mask_seams() -> list[Seam]:
    """Return those of MASK_SEAMS that this Megatron has; importing them warns that they are experimental."""
    seams = []
    for seam in MASK_SEAMS:
        with suppress(MegatronSeamError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seam.holder()
            seams.append(seam)
    return seams


def logs_first_step() -> bool:
    """Return whether Megatron prints a line after the first step of a process, too; from 0.16 on."""
    return "is_first_iteration" in inspect.signature(getattr(LOG_SEAM.holder(), LOG_SEAM.name)).parameters


def megatron_version() -> str:
    """Return the version of the installed megatron-core, or of the source tree on the path with its commit."""
    try:
        core = importlib.import_module("megatron.core")
        version = str(core.__version__)  # an installed one appends the commit of the repository around it
        return version.partition("+")[0] if "site-packages" in str(core.__file__) else version
    except Exception:
        return "(not installed, or it cannot be imported)"


def is_untried_release() -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", megatron_version())
    return numbers is not None and tuple(map(int, numbers.groups())) > NEWEST_TRIED


def has_training_loop() -> bool:
    """Return whether `megatron.training` can be found (megatron-core's wheels have it from 0.17 on)."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec("megatron.training") is not None
    return False


def arguments() -> Any:
    """Return Megatron's parsed arguments; None before its training loop has read the command line."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def wrappers(model: Any) -> list[Any]:
    """List the wrappers from the outermost one to the model itself, which is the last."""
    models = [model]
    while hasattr(models[-1], "module"):
        models.append(models[-1].module)
    return models


def as_list(model_chunks: Any) -> list[Any]:
    return list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]


def unwrapped(model_chunks: Any) -> list[Any]:
    """Return the models inside Megatron's wrappers; its own `unwrap_model` stops inside its FSDP and is new in 0.14."""
    return [wrappers(chunk)[-1] for chunk in as_list(model_chunks)]


def language_models(model_chunks: Any) -> list[Any]:
    """Return the models, or the `language_model` inside one that holds it (LLaVA, MIMO), if that is on this rank."""
    pairs = [(model, getattr(model, "language_model", None)) for model in unwrapped(model_chunks)]
    return [model if inner is None else wrappers(inner)[-1] for model, inner in pairs]


def _group(name: str, global_name: str, model: Any, **options: bool) -> Any:
    """Return the group of this name: the model's own if it carries groups (0.15 on), else Megatron's global one."""
    group = getattr(getattr(model, "pg_collection", None), name, None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return getattr(parallel_state, global_name)(**options)


tensor_group = functools.partial(_group, "tp", "get_tensor_model_parallel_group")
tensor_and_context_group = functools.partial(_group, "tp_cp", "get_tensor_and_context_parallel_group")  # in this order


def context_group(model: Any, packing: Any = None) -> Any:
    """Return the context-parallel group: the model's, or that of this micro-batch under hybrid context parallelism."""
    group, size = getattr(packing, "cp_group", None), getattr(packing, "local_cp_size", None)
    if group is None and size is None:
        return _group("cp", "get_context_parallel_group", model)
    if group is None and size != 1:
        raise NotImplementedError(f"local_cp_size is {size} without a cp_group: give both, or set --simreg-lambda 0")
    return ALONE if group is None else group


def data_group(model: Any = None, *, with_context: bool = False) -> Any:
    """Return the group of ranks that train on other sequences, with or without the context ranks."""
    # 0.19's --tensor-parallel-num-weight-shards: only the global group has the ranks that share a weight this way.
    weight_shards = getattr(getattr(model, "pg_collection", None), "gtp_remat", None)
    model = None if weight_shards is not None and weight_shards.size() > 1 else model
    name = "dp_cp" if with_context else "dp"
    return _group(name, "get_data_parallel_group", model, with_context_parallel=with_context)
