"""A described chip as a device of PyTorch: `torch.device("gcu")`, `torch.gcu`, `x.to("gcu")`.

    import torch                          # finds us by the entry point torch.backends
    x = torch.ones(3, device="gcu")       # builds and loads the rest, if this is the first use

What `import torch` does for us is little (`autoload`): the name of the device, the module
`torch.gcu`, and the native part where it has been built before. Everything else is loaded when the
device is first used (`module.py`). Operators: `operators.py`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

BUILT_IN = "gcu"
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # what drivers of others put there


def autoload() -> None:
    """Called by `import torch`: make the device known, where the settings want it."""
    name = wanted()
    if name:
        import torch

        if not hasattr(torch, name):
            _register(name)


def wanted() -> str:
    """The chip that torch is to have as its device; empty: none.

    Torch has one accelerator at a time, so ours stands back where there is another one.
    """
    from terrazzo.knobs import described_chip, knobs

    asked = knobs.torch_device
    if asked == "off" or (asked == "auto" and any(map(os.path.exists, _ACCELERATORS))):
        return ""
    return described_chip()


def register(name: str = BUILT_IN) -> ModuleType:
    """Make the chip of this name torch's device, once in a process; gives `torch.<name>`."""
    import torch

    known: ModuleType | None = getattr(torch, name, None)
    if known is not None:
        return known
    made = _register(name)
    from terrazzo.torch_device import build, start

    if build.is_loaded():  # torch may have computed gradients, and started threads without us
        start.start().start_autograd()
    return made


def _register(name: str) -> ModuleType:
    import torch

    from terrazzo.torch_device import build, distributed, module

    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True)
    distributed.register(name)
    build.load_if_built()
    return module


# Torch comes before any part of this package: it calls `autoload` while it is imported, which asks
# for all parts, and one that had begun to import torch by itself would be found half made.
import_module("torch")

__all__ = ["autoload", "register", "wanted"]
