"""What each operator means, one family a file. Importing this room registers them all."""

from terrazzo.ops import (
    activation,
    arrange,
    attention,
    contract,
    control,
    conv,
    creation,
    elementwise,
    getitem,
    indexing,
    linalg,
    linear_attention,
    loss,
    norm,
    padded,
    pool,
    quant,
    random,
    recurrent,
    reduce,
    resize,
    sampling,
    scan,
    sequence,
    shape,
    signal,
    sorting,
    vision,
)
from terrazzo.ops.methods import install

install()

__all__ = [
    "activation",
    "arrange",
    "attention",
    "contract",
    "control",
    "conv",
    "creation",
    "elementwise",
    "getitem",
    "indexing",
    "linalg",
    "linear_attention",
    "loss",
    "norm",
    "padded",
    "pool",
    "quant",
    "random",
    "recurrent",
    "reduce",
    "resize",
    "sampling",
    "scan",
    "sequence",
    "shape",
    "signal",
    "sorting",
    "vision",
]

# Functions of the public API that are more than one operator, and the array API's short names.
PUBLIC = {
    "abs": elementwise.absolute,
    "pow": elementwise.power,
    "einsum": contract.einsum,
    **{name: getattr(control, name) for name in ("cond", "while_loop", "scan")},
}
