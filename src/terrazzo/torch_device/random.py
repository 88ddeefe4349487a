"""Random numbers of the device: those of the CPU for the same seed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from terrazzo.torch_device.start import start, when_ready
from terrazzo.torch_device.streams import index_of


def generator(device: Any = None) -> torch.Generator:
    """The default generator of a device."""
    return start().default_generator(index_of(device))


def default_generators() -> tuple[torch.Generator, ...]:
    """Those of all devices."""
    return tuple(map(generator, range(start().device_count())))


def manual_seed(seed: int) -> None:
    """Set the seed of the current device; of one that is not used yet, when it is."""
    when_ready(partial(_seed, int(seed), False))


def manual_seed_all(seed: int) -> None:
    """Set the seed of all devices; torch.manual_seed does this."""
    when_ready(partial(_seed, int(seed), True))


def _seed(seed: int, everywhere: bool) -> None:
    for found in default_generators() if everywhere else (generator(),):
        found.manual_seed(seed)


def seed() -> None:
    """Set a seed that nobody knows on the current device."""
    generator().seed()


def seed_all() -> None:
    """The same one on all devices."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    """The seed of the current device."""
    return generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of the random numbers of a device, as a tensor of bytes on the CPU."""
    return generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Those of all devices."""
    return [found.get_state() for found in default_generators()]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Go on from a state."""
    generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Go on from a state on each device."""
    for device, state in enumerate(new_states):
        set_rng_state(state, device)
