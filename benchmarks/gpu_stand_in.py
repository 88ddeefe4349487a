"""The CPU in the place of a GPU, for tests that ask torch for the device "cuda" by name.

Factories and conversions that name the device get the CPU, tensors say that they are on a GPU, and
the parts of `torch.cuda` that tests call do nothing. What a library registers for torch's operators
on a GPU is registered for the CPU. Only the names change: kernels and arithmetic are as they are.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMES = ("cuda", "gpu")


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type in _NAMES
    return isinstance(value, str) and value.partition(":")[0] in _NAMES


def _here(value: Any) -> Any:
    """An argument with the CPU in the place of a GPU."""
    if _is_gpu(value):
        return torch.device("cpu")
    if isinstance(value, (tuple, list)) and any(_is_gpu(v) for v in value):
        return type(value)(_here(v) for v in value)
    return value


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:  # a name; whoever is given it finds the CPU
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        for name, value in kwargs.items():
            kwargs[name] = _here(value)
        if isinstance(kwargs.get("device"), int):  # the number of a GPU
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*(_here(a) for a in args), **kwargs)


def _within(function: Any) -> Any:
    """A function that torch's dispatcher calls, where no mode is on otherwise."""
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _OnCPU():
            return function(*args, **kwargs)

    return run


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class _Philox:
    """The state of a GPU's generator: a seed, and how many numbers were drawn."""

    def __init__(self) -> None:
        self.state = torch.tensor([0, 0])

    def get_state(self) -> torch.Tensor:
        return self.state.clone().view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state.clone().view(torch.int64)

    def initial_seed(self) -> int:
        return int(self.state[0])


def install() -> None:
    """Take the place of the GPU for the rest of this process."""
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name="CPU", gcnArchName="", multi_processor_count=8, major=8, minor=0, total_memory=8 << 30,
        max_threads_per_multi_processor=1024, warp_size=32, regs_per_multiprocessor=65536,
        shared_memory_per_block=1 << 16, shared_memory_per_multiprocessor=1 << 16,
        shared_memory_per_block_optin=1 << 16, L2_cache_size=1 << 22)
    stream = _Stream()
    nothing = {name: (lambda *_, **__: None) for name in (  # one each: dynamo tells them apart
        "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "manual_seed",
        "manual_seed_all", "init", "_lazy_init", "reset_max_memory_allocated")}
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_capability": lambda *_: (8, 0), "is_bf16_supported": lambda *_: True,
        "get_device_name": lambda *_: "CPU", "get_device_properties": lambda *_: properties,
        "current_stream": lambda *_: stream, "default_stream": lambda *_: stream,
        "mem_get_info": lambda *_: (8 << 30, 8 << 30), "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0, "is_initialized": lambda: False,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "device": lambda *_: contextlib.nullcontext(), "Event": _Event,
        "stream": lambda *_: contextlib.nullcontext(), "Stream": _Stream,
        "default_generators": (_Philox(),), "device_of": lambda *_: contextlib.nullcontext(),
    }
    for name, value in {**nothing, **answers}.items():
        setattr(cuda, name, value)
    autocast = torch.amp.autocast_mode.autocast.__init__

    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
                 ) -> None:
        if device_type in _NAMES:  # whose default is another
            device_type, dtype = "cpu", dtype or torch.float16
        autocast(self, device_type, dtype, *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = __init__  # type: ignore[method-assign]
    generator = torch.Generator

    class Generator(generator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator(_here(device))

    torch.Generator = Generator  # type: ignore[misc]
    register = torch.library.Library.impl

    def impl(self: Any, name: Any, function: Any, dispatch_key: str = "", **more: Any) -> Any:
        if dispatch_key.endswith("CUDA"):
            dispatch_key, function = dispatch_key.removesuffix("CUDA") + "CPU", _within(function)
            more["allow_override"] = True  # a library may have registered one for CPUs as well
        return register(self, name, function, dispatch_key, **more)

    torch.library.Library.impl = impl  # type: ignore[method-assign]
    _OnCPU().__enter__()
