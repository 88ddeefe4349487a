"""Which chip a graph is compiled for: the one whose name torch calls the device of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from terrazzo.chips.registry import DEFAULT, chip_named
from terrazzo.chips.registry import names as chip_names

HOST = torch.device("cpu")


def is_chip(device: torch.device) -> bool:
    """Whether we have code for tensors of a device."""
    return device.type == DEFAULT or _is_chip(device.type)


@lru_cache(maxsize=16)
def _is_chip(name: str) -> bool:
    return name != "meta" and name in chip_names() and not chip_named(name).absence


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Inside, a device is the current one of its kind: code is loaded and run there."""
    before = device.index
    if device.type != HOST.type and before is not None:
        before = torch.accelerator.current_device_index()
    if before == device.index:
        yield
        return
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def device_of(values: Iterable[Any]) -> torch.device:
    """The device that most tensors of a graph are on, numbers in tensors of the host aside."""
    for device in _devices(values):
        if device != HOST and is_chip(device):
            return device
    return HOST


def _devices(values: Iterable[Any]) -> Iterator[torch.device]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.device
        elif isinstance(value, (tuple, list)):
            yield from _devices(value)
