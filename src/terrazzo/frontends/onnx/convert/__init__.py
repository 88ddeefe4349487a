"""The converters, one family a file. Importing this room registers them all."""

from terrazzo.frontends.onnx.convert import (
    conv,
    elementwise,
    pool,
    recurrent,
)

__all__ = [
    "conv",
    "elementwise",
    "pool",
    "recurrent",
]
