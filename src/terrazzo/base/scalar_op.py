"""The record of a scalar operation: all that anybody has to know about it.

Names and texts of other rooms are data here: the routine of vector maths, the words of Triton and
its libraries, of torch and ONNX. What stands behind them is written there and found by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.scalar_accuracy import Accuracy

KINDS = "fiub"  # of types: floats, signed and unsigned integers, booleans
INSTRUCTIONS = "instructions"


class Absent(NamedTuple):
    """A column that has nothing in it, and why."""

    why: str


Texts = str | Mapping[str, str]  # one for all kinds of types, or by kinds, as {"f": .., "iu": ..}


@dataclass(frozen=True, eq=False)
class ScalarOp:
    """One row of the table OPS."""

    name: str
    arity: int
    numpy: Callable[..., Any]  # its meaning, on arrays of one type
    doc: str
    kinds: str  # of types it is defined on
    # Of its operator: as numpy promotes ("promote"), integers become floats ("float"), integers
    # and booleans only ("bits"), or a truth value ("bool").
    result: str
    cost: int  # in additions: what computing it again would cost
    infix: str | None
    accuracy: Accuracy

    operator: str | Absent  # on tensors
    # rule(f, x, y, g): the gradient of x from that of y = op(x); for two arguments a pair from
    # rule(f, x, y, z, g). `f` has all operators by name.
    gradient: Callable[..., Any] | Absent
    ufunc: str | Absent  # numpy's universal function
    # On f32 and f64: "single.exp" is a routine of chips/cpu/llvm/vmath, "libm.j0" the C library's
    # function, called lane by lane, "llvm.floor" an intrinsic. INSTRUCTIONS, and all integers and
    # booleans: what chips/cpu/llvm/scalars.py has under the operation's own name.
    cpu: tuple[str, str]
    triton: Texts | Absent  # with {0}, {1}, {type}, {bits}; _names are in codegen/triton/maths.py
    libdevice: str | Absent  # the function of NVIDIA's library, preferred to a text of ours
    mlir: str | Absent  # the operation of the math dialect that Triton's kernels arrive in
    torch: str | Absent
    onnx: Texts | Absent  # else a node of our own domain is written

    commutes: bool = False
    decides: bool = False  # a bit of an argument may change a whole number or a truth value
    digits: bool = True  # hangs on more digits of a Python number than a half type has
    written: bool = False  # the operator is written out in ops/elementwise.py
    # In terms of other operations, `op(name, *args)`, on whatever they take: scalars, arrays,
    # tensors. Then all above but numpy and doc may be left to what it is made of.
    meaning: Callable[..., Any] | None = None

    def text(self, column: Texts | Absent, kind: str) -> str | None:
        """The entry of a column for a kind of types."""
        if isinstance(column, Absent):
            return None
        if isinstance(column, str):
            return column if kind in self.kinds else None
        return next((text for kinds, text in column.items() if kind in kinds), None)


_NOT_IN_MLIR = Absent("the math dialect has none under a name of its own")


def primitive(name: str, numpy_function: Callable[..., Any], doc: str, *, arity: int = 1,
              kinds: str = "f", result: str = "float", cost: int = 1,
              infix: str | None = None, accuracy: Accuracy | None = None,
              operator: str | Absent | None = None,
              gradient: Callable[..., Any] | Absent, ufunc: str | Absent | None = None,
              cpu: str | tuple[str, str] = INSTRUCTIONS, triton: Texts | Absent,
              libdevice: str | Absent | None = None, mlir: str | Absent = _NOT_IN_MLIR,
              torch: str | Absent | None = None,
              onnx: Texts | Absent,
              **flags: Any) -> ScalarOp:
    """A row of its own; operator, library and torch call it by its name unless told otherwise."""
    named = name if operator is None else operator
    if ufunc is None:
        ufunc = numpy_function.__name__ if isinstance(numpy_function, np.ufunc) else Absent(
            "numpy has none")
    return ScalarOp(
        name, arity, numpy_function, doc, kinds, result, cost, infix, accuracy or Accuracy(),
        named, gradient, ufunc, (cpu, cpu) if isinstance(cpu, str) else cpu, triton,
        name if libdevice is None else libdevice, mlir, named if torch is None else torch, onnx,
        **flags)


_OF_ITS_PARTS = Absent("made of other operations")


def composed(name: str, meaning: Callable[..., Any], table: Mapping[str, ScalarOp], doc: str, *,
             arity: int = 1, kinds: str = "f", result: str = "float",
             ufunc: str | Absent = _OF_ITS_PARTS, torch: str | Absent = _OF_ITS_PARTS,
             onnx: Texts | Absent = _OF_ITS_PARTS, commutes: bool = False) -> ScalarOp:
    """A row made of operations of the table: all else follows from those."""

    def on_arrays(op: str, *args: Any) -> Any:
        return table[op].numpy(*args)

    return ScalarOp(
        name, arity, lambda *args: meaning(on_arrays, *args), doc, kinds, result, 1, None,
        Accuracy(), name, _OF_ITS_PARTS, ufunc, (INSTRUCTIONS, INSTRUCTIONS), _OF_ITS_PARTS,
        _OF_ITS_PARTS, _OF_ITS_PARTS, torch, onnx, commutes, meaning=meaning)
