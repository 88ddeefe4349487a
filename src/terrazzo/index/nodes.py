"""What symbolic integers are made of: interned nodes over canonical polynomials.

Building an expression simplifies it: sums and products by being polynomials, the rest by the rules
that `rules.py` enters in `SIMPLIFIERS`.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from functools import lru_cache
from numbers import Integral
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

Interval: TypeAlias = "tuple[int | None, int | None]"
Monomial: TypeAlias = "tuple[IndexExpr, ...]"
Polynomial: TypeAlias = "dict[Monomial, int]"

# Bounds what the memo tables keep alive; a whole model builds a few ten thousand distinct nodes.
MEMO_SIZE = 1 << 16

# Per operation, the functions that may know a simpler form of it (or answer None), in order.
SIMPLIFIERS: dict[str, list[Callable[..., Index | None]]] = {
    operation: [] for operation in ("floordiv", "mod", "sum", "min", "max")
}


class IndexExpr:
    """A symbolic integer; build one from `Var` with Python's operators and the functions below."""

    __slots__ = ("__weakref__", "_bounds", "_key")
    _fields: tuple[str, ...] = ()
    _rank = 0
    _key: tuple[Any, ...] | None
    _bounds: Interval | None
    # numpy's integers leave mixed arithmetic to us instead of making arrays of objects.
    __array_ufunc__ = None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return intern, (type(self), *(getattr(self, name) for name in self._fields))

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of the symbolic integer '{self}' is not known; "
            "ask proves_eq, proves_lt or proves_le instead"
        )

    def __add__(self, other: Index) -> Index:
        return add(self, other) if _is_index(other) else NotImplemented

    def __radd__(self, other: int) -> Index:
        return add(other, self) if _is_index(other) else NotImplemented

    def __sub__(self, other: Index) -> Index:
        return subtract(self, other) if _is_index(other) else NotImplemented

    def __rsub__(self, other: int) -> Index:
        return subtract(other, self) if _is_index(other) else NotImplemented

    def __mul__(self, other: Index) -> Index:
        return multiply(self, other) if _is_index(other) else NotImplemented

    def __rmul__(self, other: int) -> Index:
        return multiply(other, self) if _is_index(other) else NotImplemented

    def __floordiv__(self, other: Index) -> Index:
        return floordiv(self, other) if _is_index(other) else NotImplemented

    def __rfloordiv__(self, other: int) -> Index:
        return floordiv(other, self) if _is_index(other) else NotImplemented

    def __mod__(self, other: Index) -> Index:
        return modulo(self, other) if _is_index(other) else NotImplemented

    def __rmod__(self, other: int) -> Index:
        return modulo(other, self) if _is_index(other) else NotImplemented

    def __neg__(self) -> Index:
        return multiply(self, -1)

    def __str__(self) -> str:
        return text_of(self, lambda var: var.name)[0]

    __repr__ = __str__


Index: TypeAlias = int | IndexExpr


class Var(IndexExpr):
    """A named unknown with inclusive bounds; `None` is unbounded, and `hi` may itself be symbolic.

    `Var("j", 0, n - 1)` is a loop counter below the dimension `n`. Two variables are the same when
    their names and their bounds are.
    """

    __slots__ = ("hi", "lo", "name")
    _fields = ("name", "lo", "hi")
    _rank = 0
    name: str
    lo: int | None
    hi: Index | None

    def __new__(cls, name: str, lo: int | None = 0, hi: Index | None = None) -> Var:
        if lo is not None and isinstance(hi, int) and hi < lo:
            raise ValueError(f"variable '{name}' has no value: its bounds are {lo} to {hi}")
        return intern(cls, name, lo, hi)


class Sum(IndexExpr):
    """A polynomial: products of atoms (`terms`, each with its factor) and a constant."""

    __slots__ = ("constant", "terms")
    _fields = ("terms", "constant")
    _rank = 5
    terms: tuple[tuple[Monomial, int], ...]
    constant: int


class FloorDiv(IndexExpr):
    """`num // den`, rounded towards minus infinity."""

    __slots__ = ("den", "num")
    _fields = ("num", "den")
    _rank = 1
    num: Index
    den: Index


class Mod(IndexExpr):
    """`num % den`, between 0 and `den - 1`."""

    __slots__ = ("den", "num")
    _fields = ("num", "den")
    _rank = 2
    num: Index
    den: Index


class Min(IndexExpr):
    """The smallest of two or more values."""

    __slots__ = ("args",)
    _fields = ("args",)
    _rank = 3
    args: tuple[Index, ...]


class Max(IndexExpr):
    """The largest of two or more values."""

    __slots__ = ("args",)
    _fields = ("args",)
    _rank = 4
    args: tuple[Index, ...]


Node = TypeVar("Node", bound=IndexExpr)
_nodes: WeakValueDictionary[tuple[Any, ...], IndexExpr] = WeakValueDictionary()
# Reentrant, because collecting garbage inside it may run code that builds expressions.
_nodes_lock = threading.RLock()


def intern(cls: type[Node], *values: Any) -> Node:
    """The one node of this class with these fields."""
    identity = (cls, *values)
    node = _nodes.get(identity)
    if node is None:
        # The lock keeps two threads from making two nodes that should be the same.
        with _nodes_lock:
            node = _nodes.get(identity)
            if node is None:
                node = object.__new__(cls)
                for name, value in zip(cls._fields, values, strict=True):
                    object.__setattr__(node, name, value)
                object.__setattr__(node, "_key", None)
                object.__setattr__(node, "_bounds", None)
                _nodes[identity] = node
    return node  # type: ignore[return-value]


def sort_key(value: Any) -> Any:
    """Orders expressions by names and structure only, never by addresses or hashes."""
    if isinstance(value, IndexExpr):
        if value._key is None:
            fields = (getattr(value, name) for name in value._fields)
            object.__setattr__(value, "_key", (value._rank, *map(sort_key, fields)))
        return value._key
    if isinstance(value, tuple):
        return tuple(map(sort_key, value))
    if isinstance(value, int):
        return (9, value)
    return (8,) if value is None else value


def _is_index(value: object) -> bool:
    return isinstance(value, (IndexExpr, int, Integral))


# ---------------------------------------------------------------------------------- polynomials


def items(e: Index) -> tuple[tuple[Monomial, int], ...]:
    """The terms of an expression as a polynomial; the constant is the term of no atoms."""
    if isinstance(e, Sum):
        return (*e.terms, ((), e.constant)) if e.constant else e.terms
    if isinstance(e, IndexExpr):
        if isinstance(e, Var) and e.lo is not None and e.lo == e.hi:
            return (((), e.lo),) if e.lo else ()
        return (((e,), 1),)
    return (((), operator.index(e)),) if e else ()


def monomial_order(monomial: Monomial) -> tuple[Any, ...]:
    """Higher degrees first, then by the atoms' order: an admissible (graded) monomial order."""
    return (-len(monomial), *map(sort_key, monomial))


def _product(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    return tuple(sorted(a + b, key=sort_key))


def monomial_quotient(a: Monomial, b: Monomial) -> Monomial | None:
    """`a` without the atoms of `b`, or None where `b` has one that `a` lacks."""
    rest = list(a)
    for atom in b:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def canonical(poly: Polynomial) -> Index:
    """The canonical expression of a polynomial, after the rules for sums."""
    poly = {monomial: factor for monomial, factor in poly.items() if factor}
    if len(poly) > 1 and any(type(atom) in (FloorDiv, Mod) for m in poly for atom in m):
        simpler = _simplify("sum", poly)
        if simpler is not None:
            return simpler
    constant = poly.pop((), 0)
    if not poly:
        return constant
    if not constant and len(poly) == 1:
        ((monomial, factor),) = poly.items()
        if factor == 1 and len(monomial) == 1:
            return monomial[0]
    terms = sorted(poly.items(), key=lambda term: monomial_order(term[0]))
    return intern(Sum, tuple(terms), constant)


@lru_cache(MEMO_SIZE)
def add(a: Index, b: Index) -> Index:
    """`a + b`."""
    if isinstance(a, Sum) and isinstance(b, int) and a.constant + b:
        # No rule for sums looks at the constant, so the terms stay as they are.
        return intern(Sum, a.terms, a.constant + b)
    poly = dict(items(a))
    for monomial, factor in items(b):
        poly[monomial] = poly.get(monomial, 0) + factor
    return canonical(poly)


@lru_cache(MEMO_SIZE)
def subtract(a: Index, b: Index) -> Index:
    """`a - b`."""
    poly = dict(items(a))
    for monomial, factor in items(b):
        poly[monomial] = poly.get(monomial, 0) - factor
    return canonical(poly)


@lru_cache(MEMO_SIZE)
def multiply(a: Index, b: Index) -> Index:
    """`a * b`."""
    poly: Polynomial = {}
    for monomial_a, factor_a in items(a):
        for monomial_b, factor_b in items(b):
            monomial = _product(monomial_a, monomial_b)
            poly[monomial] = poly.get(monomial, 0) + factor_a * factor_b
    return canonical(poly)


@lru_cache(MEMO_SIZE)
def divide(num: Index, den: Index) -> tuple[Index, Index]:
    """Polynomial division: `num == quotient*den + rest`, exact over the integers.

    Factors are divided towards zero so that no term grows; the constant is divided downwards, which
    gives `(n - 1) // 64` and `(n + 63) // 64 - 1` one form.
    """
    lead, lead_factor = items(den)[0]
    quotient: Polynomial = {}
    rest = dict(items(num))
    todo = set(rest)
    while todo:
        monomial = min(todo, key=monomial_order)
        todo.remove(monomial)
        over = monomial_quotient(monomial, lead)
        if over is None:
            continue
        times = rest[monomial] // lead_factor
        if monomial and times < 0 and rest[monomial] % lead_factor:
            times += 1
        if times:
            quotient[over] = times
            for other, other_factor in items(den):
                at = _product(over, other)
                rest[at] = rest.get(at, 0) - times * other_factor
                # Only terms below the one just divided change, so each is visited once.
                if at != monomial:
                    todo.add(at)
    return canonical(quotient), canonical(rest)


def exact_quotient(num: Index, den: Index) -> Index | None:
    """The polynomial `num / den`, or None where it leaves a rest."""
    quotient, rest = divide(num, den)
    return quotient if rest == 0 else None


def without_atom(monomial: Monomial, atom: IndexExpr) -> Monomial:
    """A product with one of its factors taken out."""
    at = monomial.index(atom)
    return monomial[:at] + monomial[at + 1 :]


# ----------------------------------------------------------------------------------- operations


@lru_cache(MEMO_SIZE)
def floordiv(num: Index, den: Index) -> Index:
    """`num // den`, rounded towards minus infinity."""
    num, den = _operands(num, den, "//")
    if isinstance(num, int) and isinstance(den, int):
        return num // den
    simpler = _simplify("floordiv", num, den)
    return intern(FloorDiv, num, den) if simpler is None else simpler


@lru_cache(MEMO_SIZE)
def modulo(num: Index, den: Index) -> Index:
    """`num % den`, between 0 and `den - 1`."""
    num, den = _operands(num, den, "%")
    if isinstance(num, int) and isinstance(den, int):
        return num % den
    simpler = _simplify("mod", num, den)
    return intern(Mod, num, den) if simpler is None else simpler


def _operands(num: Index, den: Index, sign: str) -> tuple[Index, Index]:
    largest = bounds(den)[1]
    if largest is not None and largest <= 0:
        raise ValueError(f"({num}) {sign} ({den}): the divisor is never positive")
    return _plain(num), _plain(den)


def _plain(e: Index) -> Index:
    """The expression itself, but a number where a variable has only one value."""
    return canonical(dict(items(e))) if isinstance(e, Var) or not isinstance(e, IndexExpr) else e


def _simplify(operation: str, *operands: Any) -> Index | None:
    for simplifier in SIMPLIFIERS[operation]:
        result = simplifier(*operands)
        if result is not None:
            return result
    return None


def minimum(a: Index, b: Index) -> Index:
    """The smaller of two values."""
    return _extremum("min", a, b)


def maximum(a: Index, b: Index) -> Index:
    """The larger of two values."""
    return _extremum("max", a, b)


def ceildiv(a: Index, b: Index) -> Index:
    """`a / b` rounded up: how many pieces of `b` cover `a`."""
    return (a + b - 1) // b


@lru_cache(MEMO_SIZE)
def _extremum(operation: str, a: Index, b: Index) -> Index:
    kind: type[Min] | type[Max] = Min if operation == "min" else Max
    args: list[Index] = []
    for operand in (_plain(a), _plain(b)):
        args += operand.args if isinstance(operand, kind) else [operand]
    for i, x in enumerate(args):
        for j in range(i + 1, len(args)):
            merged = _simplify(operation, x, args[j], len(args))
            if merged is not None:
                for other in args[:i] + args[i + 1 : j] + args[j + 1 :]:
                    merged = _extremum(operation, merged, other)
                return merged
    return intern(kind, tuple(sorted(args, key=sort_key)))


# ---------------------------------------------------------------------------------------- bounds


def bounds(e: Index) -> Interval:
    """The inclusive interval an expression lies in, by interval arithmetic; None is unbounded."""
    if not isinstance(e, IndexExpr):
        return (e, e)
    if e._bounds is None:
        object.__setattr__(e, "_bounds", _interval(e))
    assert e._bounds is not None
    return e._bounds


def _interval(e: IndexExpr) -> Interval:
    if isinstance(e, Var):
        return e.lo, (None if e.hi is None else bounds(e.hi)[1])
    if isinstance(e, FloorDiv):
        (low, high), (small, large) = bounds(e.num), bounds(e.den)
        small = 1 if small is None else max(small, 1)
        if low is not None:
            low = low // small if low < 0 else (0 if large is None else low // large)
        if high is not None:
            high = high // small if high >= 0 else (-1 if large is None else high // large)
        return low, high
    if isinstance(e, Mod):
        (low, high), (_, large) = bounds(e.num), bounds(e.den)
        tops = [] if large is None else [large - 1]
        if low is not None and low >= 0 and high is not None:
            tops.append(high)
        return 0, min(tops, default=None)
    if isinstance(e, Min | Max):
        lows, highs = zip(*map(bounds, e.args), strict=True)
        if isinstance(e, Min):
            return _all_known(min, lows), min((h for h in highs if h is not None), default=None)
        return max((x for x in lows if x is not None), default=None), _all_known(max, highs)
    assert isinstance(e, Sum)
    low, high = e.constant, e.constant
    for monomial, factor in e.terms:
        term: Interval = (factor, factor)
        for atom in monomial:
            term = _interval_product(term, bounds(atom))
        low = None if low is None or term[0] is None else low + term[0]
        high = None if high is None or term[1] is None else high + term[1]
    return low, high


def _all_known(pick: Callable[..., int], values: tuple[int | None, ...]) -> int | None:
    return None if None in values else pick(values)


def _interval_product(a: Interval, b: Interval) -> Interval:
    def ends(interval: Interval) -> tuple[float, float]:
        low, high = interval
        return (-math.inf if low is None else low), (math.inf if high is None else high)

    # Zero times an unbounded end is zero: the unbounded end is never reached.
    corners = [x * y if x and y else 0 for x in ends(a) for y in ends(b)]
    low, high = min(corners), max(corners)
    return (None if low == -math.inf else int(low)), (None if high == math.inf else int(high))


# ----------------------------------------------------------------------------------------- text

# How tightly a piece of text holds together; a looser piece inside a tighter one gets parentheses.
_SUM, _QUOTIENT, _PRODUCT, _ATOM = range(4)


def text_of(e: Index, name: Callable[[Var], str]) -> tuple[str, int]:
    """The text of an expression and how tightly it holds together."""

    def inside(e: Index, least: int) -> str:
        text, tightness = text_of(e, name)
        return text if tightness >= least else f"({text})"

    if isinstance(e, Var):
        return name(e), _ATOM
    if isinstance(e, FloorDiv | Mod):
        sign = "//" if isinstance(e, FloorDiv) else "%"
        return f"{inside(e.num, _PRODUCT)} {sign} {inside(e.den, _ATOM)}", _QUOTIENT
    if isinstance(e, Min | Max):
        function = "min" if isinstance(e, Min) else "max"
        return f"{function}({', '.join(inside(arg, _SUM) for arg in e.args)})", _ATOM
    if isinstance(e, int):
        return str(e), (_ATOM if e >= 0 else _SUM)
    assert isinstance(e, Sum)

    def product(monomial: Monomial, number: int) -> str:
        # A leading minus binds tighter than a quotient: -(a // b) is not -a // b.
        alone = number == 1 and len(monomial) == 1 and added_any
        factors = [inside(atom, _QUOTIENT if alone else _ATOM) for atom in monomial]
        return "*".join(factors + [str(number)] * (number != 1 or not factors))

    added_any = e.constant > 0 or any(factor > 0 for _, factor in e.terms)
    added = [product(m, factor) for m, factor in e.terms if factor > 0]
    taken = [product(m, -factor) for m, factor in e.terms if factor < 0]
    if e.constant > 0:
        added.append(str(e.constant))
    elif e.constant < 0:
        taken.append(str(-e.constant))
    text = " + ".join(added) + "".join(f" - {part}" for part in taken)
    if not added:
        text = "-" + text.removeprefix(" - ")
    single = len(e.terms) == 1 and not e.constant and not taken
    return text, (_PRODUCT if single else _SUM)
