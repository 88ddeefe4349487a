"""A program in the making: values so far, and choices at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.scopes import trace_scope
from terrazzo.tools.fuzz.programs import Input, Ref, Step, call

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64)
FLOATS = ("float32", "float32", "float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
MOST_ELEMENTS = 6000


@dataclass
class Maker:
    """A program being made: values so far, and choices at random."""

    rng: np.random.Generator
    values: list[tuple[Ref, Value]] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    # ------------------------------------------------------------ choices
    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(0, len(choices)))]

    def number(self, low: int, high: int) -> int:
        """A whole number of low..high."""
        return int(self.rng.integers(low, high + 1))

    def size(self) -> int:
        return 0 if self.chance(0.01) else int(self.one(SIZES))

    def shape(self, least: int = 0, most: int = 4) -> tuple[int, ...]:
        while True:
            rank = max(least, min(self.one([0, 1, 2, 2, 3, 3, 4]), most))
            shape = tuple(self.size() for _ in range(rank))
            if math.prod(shape) <= MOST_ELEMENTS:
                return shape

    def float_type(self) -> str:
        return str(self.one(FLOATS))

    def any_type(self) -> str:
        return self.float_type() if self.chance(0.8) else str(self.one((*INTEGERS, "bool")))

    # ------------------------------------------------------------ values
    def fresh(self, shape: Sequence[int], dtype: str, fill: str | None = None, below: int = 1
              ) -> tuple[Ref, Value]:
        """A new input."""
        kind = fill or self.one(["draw"] * 8 + ["special", "extreme"])
        given = Input(tuple(shape), dtype, kind, self.number(0, 10**6), below,
                      strided=self.chance(0.15))
        self.inputs.append(given)
        value = Value(TensorType(given.shape, as_dtype(dtype)))
        self.values.append((Ref(len(self.inputs) - 1), value))
        return self.values[-1]

    def value(self, accept: Callable[[Value], bool] = lambda v: True, *, least: int = 0,
              dtype: str | None = None) -> tuple[Ref, Value]:
        """A value there is that suits, or a new input."""
        found = [v for v in self.values if accept(v[1]) and v[1].ndim >= least and (
            dtype is None or v[1].dtype.name == dtype)]
        if found and self.chance(0.85):
            return self.one(found[-6:])
        for _ in range(20):
            shape, kind = self.shape(least), dtype or self.any_type()
            if accept(Value(TensorType(shape, as_dtype(kind)))):
                return self.fresh(shape, kind)
        return self.fresh((3,) * max(least, 1), dtype or "float32")

    def float(self, least: int = 0) -> tuple[Ref, Value]:
        return self.value(lambda v: v.dtype.is_float, least=least)

    def like(self, x: Value, dtype: str | None = None) -> tuple[Ref, Value]:
        """A value of a shape that broadcasts with that of x."""
        shape = ints(x)
        kind = dtype or x.dtype.name
        found = [v for v in self.values if v[1].dtype.name == kind and _fits(ints(v[1]), shape)]
        if found and self.chance(0.6):
            return self.one(found)
        start = self.number(0, len(shape)) if self.chance(0.3) else 0
        return self.fresh([1 if self.chance(0.2) else n for n in shape[start:]], kind)

    def axis(self, x: Value) -> int:
        return self.number(-x.ndim, x.ndim - 1)

    def axes(self, x: Value) -> Any:
        """None, one axis, or several."""
        if x.ndim == 0 or self.chance(0.2):
            return None
        if self.chance(0.5):
            return self.axis(x)
        return tuple(sorted(set(int(a) for a in self.rng.integers(0, x.ndim, 2))))

    # ------------------------------------------------------------ steps
    def add(self, op: str, args: Sequence[Any], attrs: Mapping[str, Any]) -> bool:
        """Take a call into the program if the operator accepts it."""
        table = dict(self.values)
        given = [table[a] if isinstance(a, Ref) else a for a in args]
        try:
            with trace_scope():
                made = call(op, given, attrs)
        except (TerrazzoError, TypeError, ValueError, ZeroDivisionError):
            return False
        several = isinstance(made, (tuple, list))
        results = list(made) if several else [made]
        if not results or not all(isinstance(v, Value) and _modest(v) for v in results):
            return False
        self.steps.append(Step(op, tuple(args), tuple(attrs.items()), several))
        self.values += [(Ref(len(self.steps) - 1, True, i), v) for i, v in enumerate(results)]
        return True


def ints(x: Value) -> tuple[int, ...]:
    """The sizes of a value that are numbers."""
    return tuple(int(n) for n in x.shape if isinstance(n, int))


def _modest(x: Value) -> bool:
    return math.prod(ints(x)) <= 4 * MOST_ELEMENTS and not x.dtype.is_complex


def _fits(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1]))
