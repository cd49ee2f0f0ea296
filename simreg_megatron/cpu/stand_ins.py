# SPDX-License-Identifier: Apache-2.0
"""CPU replacements for the CUDA devices, streams, generators, tensor types and meshes that Megatron names.

Each function replaces one family of names, for the rest of the process; `backend.activate()` alone calls `replace`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_MEMORY = 8 << 30  # what the stand-in device claims to have, in bytes; only logs read it


def replace(torch: Any) -> None:
    _replace_devices(torch)
    _replace_random_state(torch)
    _replace_tensor_types(torch)
    _replace_placement(torch)
    _replace_meshes()
    # The compiler is left out: loading it would take longer than a tiny run's step.
    torch.compile = lambda function=None, **options: function or (lambda decorated: decorated)


class _Device(str):
    """The name of the CPU, which in Megatron's f"cuda:{device}" reads as the number of a GPU."""

    def __format__(self, specification: str) -> str:
        return "0"


def _replace_devices(torch: Any) -> None:
    cuda, cpu, stream = torch.cuda, _Device("cpu"), _Done()
    properties = SimpleNamespace(major=8, minor=0, name="cpu", total_memory=_MEMORY, multi_processor_count=1)
    answers = {
        "is_available": True, "current_device": cpu, "get_device_name": "cpu", "get_device_capability": (8, 0),
        "get_device_properties": properties, "mem_get_info": (_MEMORY, _MEMORY), "set_device": None,
        "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "memory_allocated": 0,
        "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0, "current_stream": stream,
        "default_stream": stream, "stream": contextlib.nullcontext(), "set_stream": None,
        "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, _constant(answer))
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    cuda.Stream = cuda.Event = _Done
    torch.accelerator.current_device_index, torch.accelerator.current_stream = _constant(0), _constant(stream)
    torch.Tensor.record_stream = _constant(None)
    distributed, init = torch.distributed, torch.distributed.init_process_group  # else NCCL, as a GPU seems to be there
    distributed.init_process_group = lambda backend=None, *args, **kwargs: init(backend or "gloo", *args, **kwargs)


def _constant(value: Any) -> Callable[..., Any]:
    """Make a new function each time: torch's compiler keeps rules by function and refuses one under two names."""
    return lambda *args, **kwargs: value


class _Done:
    """A stream on which everything is done, or an event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Done:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Done()

    wait_stream = wait_event = record = wait = synchronize = _constant(None)
    is_capturing = _constant(False)
    query = _constant(True)
    elapsed_time = _constant(0.0)


def _replace_random_state(torch: Any) -> None:
    cuda = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # torch.manual_seed itself calls these two: they must not call it back.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) if _ranks_cut_weights() else None
    cuda.manual_seed_all = _constant(None)
    cuda._lazy_call = lambda function, *args, **kwargs: function()

    cuda.default_generators = defaultdict(lambda: torch.default_generator)
    _give_loaders_a_generator(torch)


def _ranks_cut_weights() -> bool:
    """Return whether ranks have other pieces of a weight, or other experts, and so seed by their number."""
    groups = sys.modules.get("megatron.core.parallel_state")
    if groups is None or not groups.model_parallel_is_initialized():
        return False
    sizes = groups.get_tensor_model_parallel_world_size(), groups.get_expert_model_parallel_world_size()
    return max(sizes) > 1


def _give_loaders_a_generator(torch: Any) -> None:
    """Let loaders draw their seed from another generator than dropout's: a resumed run draws it at another time."""
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
        spelled = tensor_type(self, *args, **kwargs)  # a name, unless a type is asked for
        return spelled.replace("torch.", "torch.cuda.") if isinstance(spelled, str) else spelled  # as Megatron asserts

    torch.Tensor.type = spelled_as_cuda


def _is_cuda(device: Any) -> bool:
    return not isinstance(device, bool) and str(device).startswith("cuda")


def _replace_placement(torch: Any) -> None:
    factories = (
        "empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "linspace", "eye",
        "as_tensor", "empty_like", "zeros_like", "ones_like",
    )  # fmt: skip
    with torch.device("cpu"):  # torch notes at the first such context which functions obey one: its own
        torch.empty(0)
    for name in factories:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    to = torch.Tensor.to

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *("cpu" if _is_cuda(arg) else arg for arg in args), **_without_cuda(kwargs))

    torch.Tensor.to = to_cpu
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: factory(*args, **_without_cuda(kwargs))


def _without_cuda(options: dict[str, Any]) -> dict[str, Any]:
    options.pop("pin_memory", None)
    return options | {"device": "cpu"} if _is_cuda(options.get("device")) else options


def _replace_meshes() -> None:
    """Make meshes of "cpu" where Megatron asks for "cuda": torch's FSDP works over them."""
    from torch.distributed.device_mesh import DeviceMesh

    from_group = DeviceMesh.from_group

    def from_group_on_cpu(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return from_group(group, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    DeviceMesh.from_group = staticmethod(from_group_on_cpu)  # type: ignore[method-assign]
