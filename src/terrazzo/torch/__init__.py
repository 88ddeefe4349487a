"""What PyTorch sees of us: gradients, a backend for `torch.compile`, operators of its own.

`tz.torch.explain` and its like load torch when they are first asked for.
"""

from importlib import import_module
from typing import Any

# Public names, and the module that has each.
_PUBLIC = {
    "explain": "terrazzo.torch.report",
    "export": "terrazzo.torch.deploy",
    "onnx_translations": "terrazzo.torch.onnx_nodes",
    "register": "terrazzo.torch.registration",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'terrazzo.torch' has no attribute {name!r}")
