# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop on a machine without a GPU: stand-ins for what it asks of CUDA.

Megatron's loop names CUDA devices, streams and tensor types throughout. `activate()` answers those names on the CPU,
one process per rank over gloo, so that a newcomer can run it and tests can hold every parallel layout. It is for
learning and testing, never on by accident: it must be asked for, before Megatron is imported, where no GPU is.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from simreg_megatron.plugin.cpu import gloo_threads
from simreg_megatron.plugin.cpu.errors import CpuBackendError

MEGATRON_FLAGS = (
    "--transformer-impl", "local",
    "--distributed-backend", "gloo",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--attention-backend", "unfused",
    "--num-workers", "0",
)  # fmt: skip
"""Megatron's flags that go with the CPU: no fused kernels, gloo between processes, no loader processes."""

_MEMORY = 8 << 30  # what the stand-in device claims to have, in bytes; only logs read it
_state = {"active": False}


def is_active() -> bool:
    """Whether Megatron runs on the stand-ins in this process."""
    return _state["active"]


def requested(argv: list[str]) -> str | None:
    """ "on" or "force" if the command line (--simreg-cpu) or the environment (SIMREG_CPU) asks for the CPU."""
    for word in argv:
        if word == "--simreg-cpu" or word.startswith("--simreg-cpu="):
            return word.partition("=")[2] or "on"
    value = os.environ.get("SIMREG_CPU", "")
    return {"": None, "0": None, "1": "on"}.get(value, value)


def require_gpu() -> None:
    """Where nobody asked for the CPU: say that a GPU is missing before Megatron's long way to its own assertion.

    Raises:
        CpuBackendError: torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise CpuBackendError(
            "no GPU is here, and Megatron needs one: add --simreg-cpu (or SIMREG_CPU=1) to try it on the CPU, "
            "or see why torch.cuda.is_available() is false"
        )


def connections(flags: Sequence[str]) -> str:
    """The CUDA_DEVICE_MAX_CONNECTIONS that Megatron demands: 1 under tensor parallelism, any other under FSDP."""
    return "32" if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(flags) else "1"


def choose_flags(parser: Any) -> None:
    """Let Megatron's parser default to MEGATRON_FLAGS, as far as this release knows them; what is given wins."""
    known = [flag for flag in _by_flag() if flag[0] in parser._option_string_actions]
    chosen = parser.parse_known_args([word for flag in known for word in flag])[0]
    dests = [parser._option_string_actions[flag[0]].dest for flag in known]
    parser.set_defaults(**{dest: getattr(chosen, dest) for dest in dests})


def _by_flag() -> list[list[str]]:
    """MEGATRON_FLAGS, each with its value."""
    flags: list[list[str]] = []
    for word in MEGATRON_FLAGS:
        if word.startswith("--"):
            flags.append([])
        flags[-1].append(word)
    return flags


def activate(mode: str = "on") -> None:
    """Answer Megatron's calls to torch.cuda on the CPU, for the rest of this process.

    Args:
        mode: "on"; or "force" to leave a GPU that is there unused.

    Raises:
        CpuBackendError: Megatron is imported already, a GPU is there and mode is not "force", or mode is unknown.
    """
    if is_active():
        return
    if mode not in ("on", "force"):
        raise CpuBackendError(f"--simreg-cpu takes no value or force (SIMREG_CPU: 1 or force), not {mode!r}")
    if "megatron.core" in sys.modules:
        raise CpuBackendError(
            "the CPU backend must come before Megatron is imported: start the script with "
            "`python -m simreg_megatron SCRIPT ... --simreg-cpu`"
        )
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiled graphs would bypass the stand-ins
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", connections(sys.argv))
    import torch

    if torch.cuda.is_available() and mode != "force":
        raise CpuBackendError(
            f"a GPU is here ({torch.cuda.get_device_name(0)}): leave --simreg-cpu and SIMREG_CPU out to train on it, "
            "or say --simreg-cpu=force (SIMREG_CPU=force) to leave it idle"
        )
    _state["active"] = True
    # Megatron takes its norms and its Adam from Transformer Engine wherever that can be imported; they need a GPU.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    # Nobody on a CPU misses the fused layers whose absence Megatron reports once a module.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|transformer_engine|transformer-engine)")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _replace_device_queries(torch)
    _replace_streams(torch)
    _replace_random_state(torch)
    _replace_tensor_types(torch)
    _replace_placement(torch)
    _replace_meshes()
    _replace_compiler(torch)
    _adapt_megatron()
    atexit.register(gloo_threads.settle)
    if int(os.environ.get("RANK", "0")) == 0:
        print("> SimReg: no GPU in use, Megatron runs on the CPU over gloo (for trying and testing)", flush=True)


class _Device(str):
    """The name of the CPU, which in Megatron's f"cuda:{device}" reads as the number of a GPU."""

    def __format__(self, specification: str) -> str:
        return "0"


def _replace_device_queries(torch: Any) -> None:
    cuda, cpu = torch.cuda, _Device("cpu")

    properties = SimpleNamespace(major=8, minor=0, name="cpu", total_memory=_MEMORY, multi_processor_count=1)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.current_device = lambda: cpu
    cuda.get_device_name = lambda *args, **kwargs: "cpu"
    cuda.get_device_capability = lambda *args, **kwargs: (8, 0)
    cuda.get_device_properties = lambda *args, **kwargs: properties
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _constant(None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, _constant(0))
    cuda.mem_get_info = lambda *args, **kwargs: (_MEMORY, _MEMORY)
    cuda.memory_stats = lambda *args, **kwargs: _NoMemoryStatistics()
    torch.accelerator.current_device_index = _constant(0)


def _constant(value: Any) -> Callable[..., Any]:
    """A new function each time: torch's compiler keeps rules by function and refuses one under two names."""
    return lambda *args, **kwargs: value


class _NoMemoryStatistics(dict):
    def __missing__(self, key: str) -> int:
        return 0


class _Stream:
    """A stream on which everything is already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    """An event that happened at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _replace_streams(torch: Any) -> None:
    cuda, stream = torch.cuda, _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream, cuda.default_stream = _constant(stream), _constant(stream)
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = lambda stream: None
    cuda.is_current_stream_capturing = lambda: False
    torch.accelerator.current_stream = lambda *args, **kwargs: stream
    torch.Tensor.record_stream = lambda self, stream: None


def _replace_random_state(torch: Any) -> None:
    cuda = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # torch.manual_seed itself calls these two: they must not call it back.
    cuda.manual_seed, cuda.manual_seed_all = _constant(None), _constant(None)
    cuda._lazy_call = lambda function, *args, **kwargs: function()

    class Generators(dict):
        def __missing__(self, index: Any) -> Any:
            return torch.default_generator

    cuda.default_generators = Generators()
    _give_loaders_a_generator(torch)


def _give_loaders_a_generator(torch: Any) -> None:
    """A loader draws a seed when its reading begins: on a GPU's machine from another generator than dropout's.

    Here both are one, and a resumed run, which begins to read after it has loaded its random state, would go on with
    other dropout than the run that was never stopped.
    """
    from torch.utils.data import DataLoader

    make = DataLoader.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{"generator": torch.Generator(), **kwargs})

    DataLoader.__init__ = made  # type: ignore[method-assign]


def _replace_tensor_types(torch: Any) -> None:
    for name in ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Byte"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))  # stays a type: isinstance uses it
    tensor_type = torch.Tensor.type

    def spelled_as_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.")  # Megatron's optimizers assert this spelling

    torch.Tensor.type = spelled_as_cuda


def _is_cuda(device: Any) -> bool:
    return not isinstance(device, bool) and str(device).startswith("cuda")


def _replace_placement(torch: Any) -> None:
    factories = (
        "empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "linspace", "eye",
        "as_tensor", "empty_like", "zeros_like", "ones_like",
    )  # fmt: skip
    for name in factories:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    to = torch.Tensor.to

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *("cpu" if _is_cuda(arg) else arg for arg in args), **kwargs)

    torch.Tensor.to = to_cpu
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def made_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made_on_cpu


def _replace_meshes() -> None:
    """torch's FSDP works on the CPU too, over a mesh that says so; Megatron asks for one of "cuda"."""
    from torch.distributed.device_mesh import DeviceMesh

    from_group = DeviceMesh.from_group

    def from_group_on_cpu(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return from_group(group, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    DeviceMesh.from_group = staticmethod(from_group_on_cpu)  # type: ignore[method-assign]


def _replace_compiler(torch: Any) -> None:
    """`@torch.compile` leaves a function as it is; loading the compiler would take longer than a tiny run's step."""

    def as_it_is(function: Any = None, **options: Any) -> Any:
        return function if function is not None else (lambda decorated: decorated)

    torch.compile = as_it_is


def _adapt_megatron() -> None:
    """The places of Megatron that assume more than a device name."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from simreg_megatron.plugin.cpu import attention as cpu_attention

    dataset_utils.compile_helpers = lambda: None  # the wheel brings them compiled
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_to_host
    _allow_sequence_parallelism(WrappedTorchNorm)
    cpu_attention.adapt(DotProductAttention)


def _split_sizes_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """All-to-all takes its split sizes as numbers; upstream converts them only if they come from a GPU."""
    import torch

    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _allow_sequence_parallelism(norm_class: Any) -> None:
    """torch's norms are right on a shard too: only their weights' gradients must be marked to be summed over ranks."""
    make = norm_class.__new__

    def make_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsharded = copy.copy(config)
        unsharded.sequence_parallel = False  # upstream refuses it, for want of the mark set below
        norm = make(cls, unsharded, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    norm_class.__new__ = make_marked
