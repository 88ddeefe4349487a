"""What each operator means, one family a file. Importing this room registers them all."""

from terrazzo.ops import (
    activation,
    attention,
    contract,
    control,
    creation,
    elementwise,
    indexing,
    loss,
    norm,
    random,
    reduce,
    scan,
    shape,
    sorting,
)
from terrazzo.ops.methods import install

install()

__all__ = [
    "activation",
    "attention",
    "contract",
    "control",
    "creation",
    "elementwise",
    "indexing",
    "loss",
    "norm",
    "random",
    "reduce",
    "scan",
    "shape",
    "sorting",
]
