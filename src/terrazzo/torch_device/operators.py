"""Operators of the device, which torch is told of when it is first used."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from terrazzo.torch_device.composites import COMPOSITES

_library: list[torch.library.Library] = []  # registrations last as long as this


def register(native: ModuleType) -> None:
    """Tell torch of those in Python, and the native part of who compiles the others."""
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name, function in COMPOSITES.items():
        library.impl(name, function)
    _library.append(library)
    native.set_compiler(_compiled_call)


def _compiled_call(name: str, overload: str, args: Sequence[Any], reads_numbers: bool) -> Any:
    # The compiler is loaded with the first operator: tensors are moved without.
    from terrazzo.torch_device.plans import compiled_call

    return compiled_call(name, overload, args, reads_numbers)
