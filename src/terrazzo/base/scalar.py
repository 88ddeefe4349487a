"""Scalar expressions: the arithmetic that tensor expressions (L2) and Loop IR (L3) share.

A `Scalar` is an immutable DAG. Nodes compare by identity; sharing a node means computing it once.
Float arithmetic happens in float32 or float64 only: `call` widens half types on the way in and
rounds on the way out, and fusion drops the round trips inside a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from terrazzo.base.contraction import Contraction
from terrazzo.dtypes import DType, as_dtype, bool_, float32, int64, promote
from terrazzo.errors import DTypeError, UnknownOperator
from terrazzo.index import Index, IndexExpr, Var, substitute


class Source(Protocol):
    """What can be loaded from: a tensor of an expression or a buffer of a loop nest."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...


@dataclass(frozen=True, eq=False)
class Scalar:
    """One value of one element; see the subclasses."""

    dtype: DType

    def __add__(self, other: Any) -> Scalar:
        return call("add", self, other)

    def __radd__(self, other: Any) -> Scalar:
        return call("add", other, self)

    def __sub__(self, other: Any) -> Scalar:
        return call("sub", self, other)

    def __rsub__(self, other: Any) -> Scalar:
        return call("sub", other, self)

    def __mul__(self, other: Any) -> Scalar:
        return call("mul", self, other)

    def __rmul__(self, other: Any) -> Scalar:
        return call("mul", other, self)

    def __truediv__(self, other: Any) -> Scalar:
        return call("div", self, other)

    def __rtruediv__(self, other: Any) -> Scalar:
        return call("div", other, self)

    def __neg__(self) -> Scalar:
        return call("neg", self)

    def __lt__(self, other: Any) -> Scalar:
        return call("lt", self, other)

    def __le__(self, other: Any) -> Scalar:
        return call("le", self, other)

    def __gt__(self, other: Any) -> Scalar:
        return call("gt", self, other)

    def __ge__(self, other: Any) -> Scalar:
        return call("ge", self, other)

    def __and__(self, other: Any) -> Scalar:
        return call("and", self, other)

    def __or__(self, other: Any) -> Scalar:
        return call("or", self, other)

    def __str__(self) -> str:
        return format_scalar(self)


@dataclass(frozen=True, eq=False)
class Const(Scalar):
    """A literal."""

    value: Any


@dataclass(frozen=True, eq=False)
class Load(Scalar):
    """An element of a tensor (one index a dimension) or of a flat buffer (one index)."""

    source: Any
    indices: tuple[Index | Scalar, ...]


@dataclass(frozen=True, eq=False)
class FromIndex(Scalar):
    """The value of an index expression: what iota, masks and padding are made of."""

    index: Index


@dataclass(frozen=True, eq=False)
class Undefined(Scalar):
    """A value that does not matter: any will do."""


@dataclass(frozen=True, eq=False)
class Call(Scalar):
    """An operation of the table OPS on other scalars."""

    op: str
    args: tuple[Scalar, ...]


@dataclass(frozen=True)
class Axis:
    """One iteration variable and the range `lo <= var < hi` it runs over."""

    var: Var
    lo: Index
    hi: Index

    @property
    def extent(self) -> Index:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"{self.var} in {self.lo}..{self.hi}"


@dataclass(frozen=True, eq=False)
class Reduce(Scalar):
    """All values of `value` over `axes` combined with a reduction of the table REDUCTIONS.

    By a `reducer` several values are combined at once: `value` is a Tuple, and so is the result;
    `op` is its name then.
    """

    op: str
    axes: tuple[Axis, ...]
    value: Scalar
    reducer: Reducer | None = None
    contraction: Contraction | None = None  # of a sum of products: which axis is which


@dataclass(frozen=True, eq=False)
class Reducer:
    """A reduction of a user's own: how two tuples become one, in any order, and what begins it."""

    name: str
    combine: Callable[[Sequence[Scalar], Sequence[Scalar]], Sequence[Scalar]]
    identity: tuple[Const, ...]


@dataclass(frozen=True, eq=False)
class Tuple(Scalar):
    """Several values at once; its type is that of the first."""

    items: tuple[Scalar, ...]


@dataclass(frozen=True, eq=False)
class Item(Scalar):
    """One of the values of a tuple, or of a reduction that has several."""

    value: Scalar
    number: int


# ---------------------------------------------------------------- the table of operations
@dataclass(frozen=True)
class ScalarOp:
    """What an operation means in numpy, and how its result type follows from its arguments."""

    name: str
    arity: int
    numpy: Callable[..., Any]
    result: str = "same"  # "same" as the arguments, "bool"
    cost: int = 1  # in additions: what recomputing it would cost
    infix: str | None = None


def _erf_family(name: str) -> Callable[[Any], Any]:
    import math

    special: dict[str, Callable[[float], float]] = {
        "erf": math.erf, "erfc": math.erfc, "lgamma": _lgamma, "digamma": _digamma,
        "erfinv": _erfinv,
    }
    vectorised = np.vectorize(special[name], otypes=[np.float64])

    def reference(x: Any) -> Any:
        x = np.asarray(x)
        return vectorised(x.astype(np.float64)).astype(x.dtype) if x.size else x.copy()

    return reference


def _lgamma(x: float) -> float:
    import math

    if x in (np.inf, -np.inf):
        return np.inf
    if x <= 0 and x == int(x):
        return np.inf
    try:
        return math.lgamma(x)
    except OverflowError:
        return np.inf


def _digamma(x: float) -> float:
    import math

    if np.isnan(x) or x == -np.inf:
        return np.nan
    if x == np.inf:
        return np.inf
    if x == 0:
        return -math.copysign(np.inf, x)
    if x < 0:
        if x == int(x):
            return np.nan
        return _digamma(1 - x) - math.pi / math.tan(math.pi * (x - round(x)))
    shift = 0.0
    while x < 20:  # recurrence up to where the asymptotic series holds to the last bit
        shift -= 1 / x
        x += 1
    y = 1 / (x * x)
    series = y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * (1 / 240 - y * (1 / 132)))))
    return shift + math.log(x) - 0.5 / x - series


def _erfinv(y: float) -> float:
    import math
    from statistics import NormalDist

    if not -1 <= y <= 1:
        return math.nan
    if abs(y) == 1:
        return math.copysign(math.inf, y)
    if y == 0:
        return y
    if abs(y) < 0.9:
        x = NormalDist().inv_cdf((y + 1) / 2) / math.sqrt(2)
    else:
        tail = (1 - abs(y)) / 2
        x = math.copysign(-NormalDist().inv_cdf(tail) / math.sqrt(2), y)
    for _ in range(2):  # Newton steps bring it to float64's accuracy
        error = math.erf(x) - y if abs(y) < 0.5 else math.copysign(
            (1 - abs(y)) - math.erfc(abs(x)), y)
        x -= error * math.sqrt(math.pi) / 2 * math.exp(x * x)
    return x


def _libm(name: str, arity: int) -> Callable[..., Any]:
    """A function of the C library on float64; an order comes first, as in jn."""

    def reference(*args: Any) -> Any:
        import ctypes
        import ctypes.util

        function = ctypes.CDLL(ctypes.util.find_library("m"))[name]
        order = ctypes.c_int if name in ("jn", "yn") else ctypes.c_double
        function.argtypes = (order, *(ctypes.c_double,) * (arity - 1))
        function.restype = ctypes.c_double
        vectorised = np.vectorize(
            lambda first, *rest: function(int(first) if order is ctypes.c_int else first, *rest),
            otypes=[np.float64])
        return vectorised(*args).astype(np.asarray(args[-1]).dtype)

    return reference


def _fma_of_numbers(a: float, b: float, c: float, single: bool) -> float:
    from fractions import Fraction

    if not np.isfinite([a, b]).all() or a * b == 0:
        return a * b + c
    if not np.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        nearest = float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf
    # On the way to float32 float64 must be rounded to odd, or the second rounding could err.
    if single and Fraction(nearest) != exact and np.float64(nearest).view(np.int64) % 2 == 0:
        return float(np.nextafter(nearest, np.inf if exact > nearest else -np.inf))
    return nearest


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    single = np.vectorize(_fma_of_numbers, otypes=[np.float64])
    with np.errstate(all="ignore"):
        return single(a, b, c, a.dtype == np.float32).astype(a.dtype) if a.size else a.copy()


def _numpy_floordiv(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.floor_divide(a, b)


def _numpy_mod(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.remainder(a, b)


def _power(x: Any, y: Any) -> Any:
    """As C has it: for the power of a half numpy takes a root, which minus infinity has not."""
    result = np.asarray(np.power(x, y))
    if as_dtype(result.dtype).is_float:
        result = np.where((np.asarray(x) == -np.inf) & (np.asarray(y) == 0.5), np.inf,
                          result).astype(result.dtype)
    return result


def _sigmoid(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return (1 / (1 + np.exp(-x))).astype(np.asarray(x).dtype)


def _shift(function: Callable[..., Any], over: Callable[[Any], Any]) -> Callable[..., Any]:
    def reference(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(a, b)
        bits = a.dtype.itemsize * 8
        inside = (b >= 0) & (b < bits)
        safe = np.where(inside, b, 0).astype(a.dtype)
        return np.where(inside, function(a, safe), np.asarray(over(a)).astype(a.dtype))

    return reference


# Functions that generated code calls from the C library, element by element: names and arities.
LIBM = {"j0": 1, "j1": 1, "y0": 1, "y1": 1, "jn": 2, "yn": 2, "tgamma": 1, "remainder": 2}


def _table() -> dict[str, ScalarOp]:
    rows = [
        ScalarOp("add", 2, np.add, infix="+"),
        ScalarOp("sub", 2, np.subtract, infix="-"),
        ScalarOp("mul", 2, np.multiply, infix="*"),
        ScalarOp("div", 2, np.true_divide, infix="/", cost=4),
        ScalarOp("floordiv", 2, _numpy_floordiv, infix="//", cost=8),
        ScalarOp("mod", 2, _numpy_mod, infix="%", cost=8),
        ScalarOp("fmod", 2, np.fmod, cost=8),
        ScalarOp("min", 2, np.minimum),
        ScalarOp("max", 2, np.maximum),
        ScalarOp("neg", 1, np.negative),
        ScalarOp("abs", 1, np.absolute),
        ScalarOp("sign", 1, np.sign, cost=2),
        ScalarOp("floor", 1, np.floor),
        ScalarOp("ceil", 1, np.ceil),
        ScalarOp("trunc", 1, np.trunc),
        ScalarOp("round", 1, np.rint),
        ScalarOp("sqrt", 1, np.sqrt, cost=4),
        ScalarOp("rsqrt", 1, lambda x: (1 / np.sqrt(x)).astype(np.asarray(x).dtype), cost=6),
        ScalarOp("pow", 2, _power, cost=30, infix="**"),
        ScalarOp("atan2", 2, np.arctan2, cost=20),
        ScalarOp("hypot", 2, np.hypot, cost=8),
        ScalarOp("sigmoid", 1, _sigmoid, cost=12),
        ScalarOp("eq", 2, np.equal, "bool", infix="=="),
        ScalarOp("ne", 2, np.not_equal, "bool", infix="!="),
        ScalarOp("lt", 2, np.less, "bool", infix="<"),
        ScalarOp("le", 2, np.less_equal, "bool", infix="<="),
        ScalarOp("gt", 2, np.greater, "bool", infix=">"),
        ScalarOp("ge", 2, np.greater_equal, "bool", infix=">="),
        ScalarOp("and", 2, np.bitwise_and, infix="&"),
        ScalarOp("or", 2, np.bitwise_or, infix="|"),
        ScalarOp("xor", 2, np.bitwise_xor, infix="^"),
        ScalarOp("not", 1, np.invert),
        ScalarOp("shl", 2, _shift(np.left_shift, np.zeros_like), infix="<<"),
        ScalarOp("shr", 2, _shift(np.right_shift, lambda a: np.where(a < 0, -1, 0)), infix=">>"),
        ScalarOp("isnan", 1, np.isnan, "bool"),
        ScalarOp("isinf", 1, np.isinf, "bool"),
        ScalarOp("isfinite", 1, np.isfinite, "bool"),
        ScalarOp("where", 3, np.where),
        ScalarOp("cast", 1, lambda x: x),
        ScalarOp("bitcast", 1, lambda x: x),
        ScalarOp("copysign", 2, np.copysign),
        ScalarOp("fma", 3, _fma),
    ]
    transcendental = {
        "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2,
        "log10": np.log10, "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan,
        "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh,
        "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh,
        "atanh": np.arctanh, "cbrt": np.cbrt,
    }
    rows += [ScalarOp(name, 1, function, cost=15) for name, function in transcendental.items()]
    rows += [ScalarOp(name, 1, _erf_family(name), cost=20)
             for name in ("erf", "erfc", "lgamma", "digamma", "erfinv")]
    rows += [ScalarOp(name, arity, _libm(name, arity), cost=40) for name, arity in LIBM.items()]
    return {row.name: row for row in rows}


OPS: dict[str, ScalarOp] = _table()


@dataclass(frozen=True)
class Reduction:
    """An associative operation with its identity, as used by Reduce and by reducing stores."""

    op: str
    numpy: Callable[..., Any]
    identity: Callable[[DType], Any]


REDUCTIONS: dict[str, Reduction] = {
    "add": Reduction("add", np.add.reduce, lambda t: 0),
    "mul": Reduction("mul", np.multiply.reduce, lambda t: 1),
    "max": Reduction("max", np.maximum.reduce, lambda t: lowest(t)),
    "min": Reduction("min", np.minimum.reduce, lambda t: highest(t)),
    "and": Reduction("and", np.bitwise_and.reduce, lambda t: True if t is bool_ else -1),
    "or": Reduction("or", np.bitwise_or.reduce, lambda t: False if t is bool_ else 0),
}


def lowest(dtype: DType) -> Any:
    """The value that never wins a maximum."""
    if dtype.is_float:
        return -np.inf
    return False if dtype is bool_ else int(np.iinfo(dtype.np).min)


def highest(dtype: DType) -> Any:
    """The value that never wins a minimum."""
    if dtype.is_float:
        return np.inf
    return True if dtype is bool_ else int(np.iinfo(dtype.np).max)


# ---------------------------------------------------------------- building
def const(value: Any, dtype: DType | None = None) -> Const:
    """A literal of the given type (float32, int64 or bool when none is given)."""
    if dtype is None:
        dtype = bool_ if isinstance(value, bool) else int64 if isinstance(value, int) else float32
    return Const(dtype, value)


def as_scalar(value: Any, like: DType | None = None) -> Scalar:
    """A Scalar from a Scalar, an index expression or a Python number (typed like `like`)."""
    if isinstance(value, Scalar):
        return value
    if isinstance(value, IndexExpr):
        return FromIndex(int64, value)
    if like is not None and not (isinstance(value, float) and like.is_integer):
        return Const(like, value)
    return const(value)


def call(op: str, *args: Any, dtype: DType | None = None) -> Scalar:
    """Apply an operation of OPS; converts Python numbers, promotes types, widens half types."""
    row = OPS.get(op)
    if row is None:
        raise UnknownOperator(f"there is no scalar operation {op!r}", hint="see scalar.OPS")
    if len(args) != row.arity:
        raise DTypeError(f"{op} takes {row.arity} arguments, got {len(args)}")
    operands = args[1:] if op == "where" else args  # numbers are typed by these, not by a mask
    like = next((a.dtype for a in operands if isinstance(a, Scalar)), None)
    values = [as_scalar(a, like) for a in args]
    if op == "cast":
        return cast(values[0], dtype or values[0].dtype)
    if op == "where":
        joint = promote(values[1].dtype, values[2].dtype)
        return Call(joint, op, (values[0], cast(values[1], joint), cast(values[2], joint)))
    joint = promote(*(v.dtype for v in values))
    wide = joint.compute
    result = Call(bool_ if row.result == "bool" else wide, op,
                  tuple(cast(v, wide) for v in values))
    return result if row.result == "bool" else cast(result, joint)


def cast(value: Scalar, dtype: DType | Any) -> Scalar:
    """Convert to another type; nothing happens when it has that type already."""
    dtype = as_dtype(dtype)
    if value.dtype is dtype:
        return value
    if isinstance(value, Const) and dtype.is_float and not value.dtype.is_complex:
        return Const(dtype, float(np.asarray(value.value, value.dtype.np).astype(dtype.np)))
    return Call(dtype, "cast", (value,))


def reduce(op: str, value: Scalar, axes: Sequence[Axis],
           contraction: Contraction | None = None) -> Scalar:
    """Combine `value` over `axes`; half types are accumulated in float32."""
    wide = value.dtype.compute
    return cast(Reduce(wide, op, tuple(axes), cast(value, wide), contraction=contraction),
                value.dtype)


def identity_of(reduction: Reduce) -> Scalar:
    """What a reduction of nothing gives: one value, or a Tuple."""
    if reduction.reducer is not None:
        return Tuple(reduction.dtype, reduction.reducer.identity)
    return const(REDUCTIONS[reduction.op].identity(reduction.dtype), reduction.dtype)


def parts(value: Scalar) -> tuple[Scalar, ...]:
    """The values of a Tuple, or the one value."""
    return value.items if isinstance(value, Tuple) else (value,)


def where(condition: Scalar, yes: Any, no: Any) -> Scalar:
    """`yes` where the condition holds, else `no`."""
    return call("where", condition, yes, no)


# ---------------------------------------------------------------- walking
def children(node: Scalar) -> tuple[Scalar, ...]:
    """The scalars a node is computed from."""
    if isinstance(node, Call):
        return node.args
    if isinstance(node, Load):
        return tuple([i for i in node.indices if isinstance(i, Scalar)])
    if isinstance(node, Tuple):
        return node.items
    return (node.value,) if isinstance(node, (Reduce, Item)) else ()


def walk(root: Scalar) -> Iterator[Scalar]:
    """Every node once, arguments before their users."""
    return iter(_in_order(root))


@lru_cache(maxsize=64)  # passes look at an expression several times before they go on
def _in_order(root: Scalar) -> list[Scalar]:
    seen: set[int] = set()
    order: list[Scalar] = []
    stack: list[Scalar | tuple[Scalar]] = [root]  # a tuple: its arguments are done
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            order.append(node[0])
        elif id(node) not in seen:
            seen.add(id(node))
            arguments = children(node)
            if arguments:
                stack.append((node,))
                stack.extend(arguments[::-1])
            else:
                order.append(node)
    return order


def rewrite(root: Scalar, visit: Callable[[Scalar], Scalar | None]) -> Scalar:
    """Rebuild bottom up; `visit` gets each rebuilt node and may answer with a replacement."""
    done: dict[int, Scalar] = {}
    for node in walk(root):
        fresh = node
        if isinstance(node, Call):
            for arg in node.args:
                if done[id(arg)] is not arg:
                    fresh = Call(node.dtype, node.op, tuple([done[id(a)] for a in node.args]))
                    break
        elif isinstance(node, Load):
            for index in node.indices:
                if isinstance(index, Scalar) and done[id(index)] is not index:
                    fresh = Load(node.dtype, node.source, tuple(
                        [done[id(i)] if isinstance(i, Scalar) else i for i in node.indices]))
                    break
        elif isinstance(node, Reduce) and done[id(node.value)] is not node.value:
            fresh = replace(node, value=done[id(node.value)])
        elif isinstance(node, Tuple) and any(done[id(i)] is not i for i in node.items):
            fresh = Tuple(node.dtype, tuple([done[id(i)] for i in node.items]))
        elif isinstance(node, Item) and done[id(node.value)] is not node.value:
            whole = done[id(node.value)]
            fresh = whole.items[node.number] if isinstance(whole, Tuple) else Item(
                node.dtype, whole, node.number)
        answer = visit(fresh)
        done[id(node)] = fresh if answer is None else answer
    return done[id(root)]


def substitute_indices(root: Scalar, values: Mapping[Var, Index]) -> Scalar:
    """Replace index variables everywhere, in addresses, masks and reduction ranges."""
    if not values:
        return root
    table = dict(values)

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Load):
            indices = tuple(i if isinstance(i, Scalar) else substitute(i, table)
                            for i in node.indices)
            return Load(node.dtype, node.source, indices)
        if isinstance(node, FromIndex):
            return FromIndex(node.dtype, substitute(node.index, table))
        if isinstance(node, Reduce):
            axes = tuple(Axis(a.var, substitute(a.lo, table), substitute(a.hi, table))
                         for a in node.axes)
            roles = node.contraction and node.contraction.mapped(lambda i: substitute(i, table))
            return replace(node, axes=axes, contraction=roles)
        return None

    return rewrite(root, visit)


def same(a: Scalar, b: Scalar) -> bool:
    """Whether two expressions are alike node for node, and share nodes alike."""
    ours, theirs = list(walk(a)), list(walk(b))
    if len(ours) != len(theirs):
        return False
    partner: dict[int, int] = {}
    for x, y in zip(ours, theirs, strict=True):
        if x.dtype is not y.dtype or _own(x) != _own(y) or (
                [partner[id(c)] for c in children(x)] != [id(c) for c in children(y)]):
            return False
        partner[id(x)] = id(y)
    return True


def _own(node: Scalar) -> tuple[object, ...]:
    """What a node is, apart from its type and its arguments."""
    if isinstance(node, Call):
        return Call, node.op
    if isinstance(node, Const):
        return Const, repr(node.value)  # nan is nan, and 0.0 is not -0.0
    if isinstance(node, FromIndex):
        return FromIndex, node.index
    if isinstance(node, Load):
        return Load, id(node.source), *(None if isinstance(i, Scalar) else i for i in node.indices)
    return type(node), id(node)


def loads(root: Scalar) -> list[Load]:
    """Every load, in order of first use."""
    return [node for node in walk(root) if isinstance(node, Load)]


def cost(root: Scalar) -> int:
    """How dear one evaluation is, counted in additions."""
    return sum(OPS[n.op].cost for n in walk(root) if isinstance(n, Call) and n.op != "cast")


# ---------------------------------------------------------------- printing
def format_scalar(root: Scalar) -> str:
    """One line of text: `0.5 * x[i, j] * (1 + tanh(...))`."""
    return _Printer({}).text(root)[0]


_LONGEST = 300  # nodes of an expression that is printed as one line, shared ones as often as used


def format_lines(root: Scalar) -> list[str]:
    """One line, or one with names for what is shared if it would grow beyond reading."""
    size: dict[int, int] = {}
    for node in walk(root):
        size[id(node)] = 1 + sum(size[id(child)] for child in children(node))
    return [format_scalar(root)] if size[id(root)] <= _LONGEST else format_shared(root)


def format_shared(root: Scalar, used: Callable[[int], str] | None = None) -> list[str]:
    """Text in which what is used more than once has a name; the last line is the value."""
    uses: dict[int, int] = {}
    for node in walk(root):
        for child in children(node):
            uses[id(child)] = uses.get(id(child), 0) + 1
    names: dict[int, str] = {}
    printer, lines = _Printer(names), []
    for node in walk(root):
        if uses.get(id(node), 0) > 1 and isinstance(node, Call) and node.op != "cast":
            text = printer.text(node)[0]
            names[id(node)] = used(len(names)) if used else f"t{len(names)}"
            lines.append(f"{names[id(node)]} = {text}")
    return [*lines, printer.text(root)[0]]


_PRECEDENCE = {"|": 1, "^": 2, "&": 3, "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4,
               "<<": 5, ">>": 5, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7, "**": 9}


class _Printer:
    """Writes expressions; `names` are what shared nodes are called that were written before."""

    def __init__(self, names: dict[int, str]):
        self.names = names

    def text(self, root: Scalar) -> tuple[str, int]:
        """The text and how tightly it binds."""
        done: dict[int, tuple[str, int]] = {}
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in done:
                continue
            if id(node) in self.names:
                done[id(node)] = self.names[id(node)], 10
            elif ready:
                done[id(node)] = self.own_text(node, done)
            else:
                stack.append((node, True))
                stack += [(child, False) for child in children(node)]
        return done[id(root)]

    def own_text(self, node: Scalar, done: Mapping[int, tuple[str, int]]) -> tuple[str, int]:
        """The text of a node whose arguments' texts are there."""
        if isinstance(node, Const):
            return format_literal(node.value), 10
        if isinstance(node, Undefined):
            return "undefined", 10
        if isinstance(node, FromIndex):
            return (str(node.index), 10) if isinstance(node.index, (int, Var)) else (
                f"({node.index})", 10)
        if isinstance(node, Load):
            inner = ", ".join(done[id(i)][0] if isinstance(i, Scalar) else str(i)
                              for i in node.indices)
            return f"{node.source.name}[{inner}]", 10
        if isinstance(node, Reduce):
            axes = ", ".join(str(a) for a in node.axes)
            name = node.op if node.reducer is not None else _REDUCE_NAMES[node.op]
            return f"{name}({axes}: {done[id(node.value)][0]})", 10
        if isinstance(node, Tuple):
            return f"({', '.join(done[id(i)][0] for i in node.items)})", 10
        if isinstance(node, Item):
            return f"{done[id(node.value)][0]}.{node.number}", 10
        assert isinstance(node, Call)
        symbol = OPS[node.op].infix
        args = [done[id(a)] for a in node.args]
        if symbol is not None:
            level = _PRECEDENCE[symbol]
            left, right = args
            a = left[0] if left[1] >= level else f"({left[0]})"
            b = right[0] if right[1] > level else f"({right[0]})"
            return f"{a} {symbol} {b}", level
        if node.op == "cast":
            return f"{node.dtype.short}({args[0][0]})", 10
        if node.op == "neg":
            value, level = args[0]
            return (f"-{value}" if level >= 10 else f"-({value})"), 8
        return f"{node.op}({', '.join(text for text, _ in args)})", 10


_REDUCE_NAMES = {"add": "sum", "mul": "prod", "max": "max", "min": "min", "and": "all", "or": "any"}


def format_literal(value: Any) -> str:
    """A number as short as it can be without losing float32's accuracy."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if isinstance(value, complex):
        return str(value)
    text = f"{float(value):.9g}"
    return text if any(c in text for c in ".einf") else text + ".0"
