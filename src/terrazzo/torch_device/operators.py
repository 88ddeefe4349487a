"""Operators of the device that are written in Python, registered when the device is first used."""

from __future__ import annotations

from types import ModuleType

import torch

from terrazzo.torch_device.composites import COMPOSITES

_library: list[torch.library.Library] = []  # registrations last as long as this


def register(native: ModuleType) -> None:
    """Tell torch of them."""
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name, function in COMPOSITES.items():
        library.impl(name, function)
    _library.append(library)
