"""The forms of calls that one plan serves: which sizes vary, and which numbers decide.

Compiling for a new size takes longer than running it. So a size that differs between calls becomes
a symbol, and one that data decides (how many boxes there are) is one from the start; what the plan
then rests on are guards. Likewise for numbers that shapes are made of and that come as contents of
a tensor: one that differs between calls becomes a symbol, whose value is shown to compiled code by
the shape of an empty array, its carrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from terrazzo.dtypes import uint8
from terrazzo.frontends.onnx.session.fitting import Fit
from terrazzo.frontends.onnx.shape_values import Sizes
from terrazzo.frontends.onnx.sizes import bindable, identifier
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, IndexExpr, Var, evaluate, free_vars
from terrazzo.index.guards import Guard

Types = Mapping[str, TensorType]
Values = Mapping[str, Any]
_MOST_SYMBOLS = 16  # elements of a tensor that may become symbols


@dataclass(frozen=True, eq=False)
class Form:
    """Types of the tensors that a part reads, some sizes symbolic, and the contents it rests on."""

    given: Types  # of the call that it was made for
    types: Types  # with symbolic sizes, and with carriers
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)  # contents that are fixed
    contents: Mapping[str, Sizes] = field(default_factory=dict)  # contents with symbols in them
    carriers: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # tensor and element
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the symbols, when it was made
    guards: tuple[Guard, ...] = ()

    @property
    def symbolic(self) -> bool:
        """Whether it serves more than one call."""
        return bool(self.sizes)

    def guarded(self, guards: Iterable[Guard]) -> Form:
        """The same for calls that keep to guards."""
        return replace(self, guards=tuple(guards))

    @cached_property
    def _kinds(self) -> dict[str, tuple[Any, int]]:
        return {n: (t.dtype, len(t.shape)) for n, t in self.given.items()}

    @cached_property
    def _fit(self) -> Fit:
        return Fit({n: t.shape for n, t in self.types.items()}, self.guards, numbers=True)

    def serves(self, types: Types, values: Values) -> bool:
        """Whether a call is of this form."""
        if types.keys() != self._kinds.keys() or any(
                (t.dtype, len(t.shape)) != self._kinds[n] for n, t in types.items()):
            return False
        return all(np.array_equal(values[n], array) for n, array in self.numbers.items()) and all(
            _alike(values[n], sizes.items) for n, sizes in self.contents.items()) and (
            self._fit.fits(self.with_carriers(values)))

    def with_carriers(self, values: Values) -> Values:
        """The values, and for each symbol that is a number in one of them an array of that size."""
        if not self.carriers:
            return values
        return {**values, **{name: self._carrier(name, values) for name in self.carriers}}

    def arrays(self, names: Sequence[str], values: Values) -> list[Any]:
        """Some of the values, carriers among them."""
        if not self.carriers:
            return [values[n] for n in names]
        return [self._carrier(n, values) if n in self.carriers else values[n] for n in names]

    def _carrier(self, name: str, values: Values) -> np.ndarray:
        of, i = self.carriers[name]
        return np.empty((int(values[of].reshape(-1)[i]), 0), np.uint8)


def _alike(array: Any, pattern: np.ndarray) -> bool:
    """Whether contents are those of a pattern; symbols stand for what may be a size."""
    return array.shape == pattern.shape and all(
        n >= 0 and n == int(n) if isinstance(p, IndexExpr) else n == p
        for n, p in zip(array.reshape(-1), pattern.reshape(-1), strict=True))


def _whole(array: np.ndarray) -> bool:
    """Whether numbers may be sizes: floats that are whole may, as exporters compute with them."""
    if array.dtype.kind != "f":
        return True
    return bool(np.isfinite(array).all() and (np.abs(array) < 1 << 24).all() and (
        array == np.floor(array)).all())


@dataclass(eq=False)
class Forms:
    """What is known about the calls that reach one place of a model."""

    expected: Types  # types known beforehand, with symbolic sizes
    counted: Mapping[str, Sequence[int]] = field(default_factory=dict)  # axes that data decides
    computed: frozenset[str] = frozenset()  # tensors that the model makes from data
    arithmetic: Mapping[str, Sizes] = field(default_factory=dict)  # what it makes of sizes alone
    numbers_only: set[str] = field(default_factory=set)  # contents that symbols are no use in
    _seen: dict[str, TensorType] = field(default_factory=dict)
    _held: dict[str, np.ndarray] = field(default_factory=dict)
    _symbols: dict[tuple[str, str, int], Var] = field(default_factory=dict)

    def exact(self, types: Types, values: Values, contents: Iterable[str]) -> Form:
        """The form of one call alone."""
        return Form(types, types, {n: np.asarray(values[n]) for n in contents if n in types})

    def meet(self, types: Types, values: Values, contents: Iterable[str]) -> Form:
        """The form of a call and of all like it, by what differed so far."""
        for name, type in types.items():
            self._seen[name] = self._merged(name, type)
        self._agree(types)
        numbers: dict[str, np.ndarray] = {}
        symbolic: dict[str, Sizes] = {}
        carriers: dict[str, tuple[str, int]] = {}
        merged = {n: self._seen[n] for n in types}
        shown = {n for t in merged.values() for n in t.shape}
        for name, sizes in self.arithmetic.items():
            if name in types and name not in self.numbers_only and all(
                    shown.issuperset(free_vars(n)) for n in sizes.items.reshape(-1)):
                symbolic[name] = sizes
        for name in sorted(set(contents) & types.keys() - symbolic.keys()):
            pattern = self._pattern(name, np.asarray(values[name]))
            places = [i for i, n in enumerate(pattern.reshape(-1)) if isinstance(n, IndexExpr)]
            if not places:
                numbers[name] = np.asarray(values[name])
                continue
            symbolic[name] = Sizes(pattern, types[name].dtype)
            for i in places:
                carrier = f"{name}#{i}"
                carriers[carrier] = (name, i)
                merged[carrier] = TensorType((pattern.reshape(-1)[i], 0), uint8)
        merged = bindable(merged)
        form = Form(types, merged, numbers, symbolic, carriers)
        arrays = form.with_carriers(values)
        known = {n.name: int(size) for name, t in merged.items() for n, size in zip(
            t.shape, arrays[name].shape, strict=True) if isinstance(n, Var)}
        return replace(form, sizes=known)

    def _merged(self, name: str, type: TensorType) -> TensorType:
        known = self._seen.get(name, self.expected.get(name))
        if known is None or known.dtype is not type.dtype or len(known.shape) != len(type.shape):
            axes = {a % len(type.shape) for a in self.counted.get(name, ()) if type.shape}
            return TensorType(tuple(self._symbol("size", name, d) if d in axes else n
                                    for d, n in enumerate(type.shape)), type.dtype)
        return TensorType(tuple(
            k if isinstance(k, IndexExpr) or k == n else self._symbol("size", name, d)
            for d, (k, n) in enumerate(zip(known.shape, type.shape, strict=True))), type.dtype)

    def _agree(self, types: Types) -> None:
        """Give places a symbol of their own where their sizes are not what they should be."""
        sizes: dict[str, int] = {}

        def agreed(name: str, d: int, n: Index, size: Any) -> Index:
            if not isinstance(n, IndexExpr):
                return n
            if isinstance(n, Var) and sizes.setdefault(n.name, int(size)) == size:
                return n
            try:
                if evaluate(n, sizes) == size:
                    return n
            except (KeyError, ZeroDivisionError):
                pass  # sizes that nobody shows: `bindable` gives the whole a name
            own = self._symbol("size", name, d)
            sizes[own.name] = int(size)
            return own

        for plain in (True, False):  # formulas once their names have values
            for name, type in types.items():
                seen = self._seen[name]
                self._seen[name] = TensorType(tuple(
                    agreed(name, d, n, size) if isinstance(n, Var) is plain else n
                    for d, (n, size) in enumerate(zip(seen.shape, type.shape, strict=True))),
                    seen.dtype)

    def _pattern(self, name: str, array: np.ndarray) -> np.ndarray:
        """Contents, with symbols for those that differed between calls."""
        now = array.astype(object)
        if array.dtype.kind not in "iuf" or name in self.numbers_only or (
                array.size > _MOST_SYMBOLS) or not _whole(array):
            return now
        now = array.astype(np.int64).astype(object)
        held = self._held.get(name)
        if held is None or held.shape != now.shape:
            # What data computes will differ, unless it is one of the numbers that stand for more.
            held = np.where(array < 2, now, -1) if name in self.computed else now
        held = self._held[name] = np.array([
            h if isinstance(h, IndexExpr) or h == n else self._symbol("element", name, i)
            for i, (h, n) in enumerate(zip(held.reshape(-1), now.reshape(-1), strict=True))
        ] + [None], object)[:-1].reshape(now.shape)
        return np.where(array >= 0, held, now)

    def _symbol(self, kind: str, name: str, place: int) -> Var:
        """The symbol of one place, with a name that no other has."""
        key = (kind, name, place)
        if key not in self._symbols:
            taken = {v.name for t in self.expected.values() for n in t.shape
                     for v in free_vars(n)} | {v.name for v in self._symbols.values()}
            text = f"{identifier(name)}_{place}" if kind == "size" else (
                f"{identifier(name)}_at_{place}")
            while text in taken:
                text += "_"
            self._symbols[key] = Var(text)
        return self._symbols[key]
