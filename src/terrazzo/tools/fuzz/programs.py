"""Random programs for the fuzzer: what they are, how they are made, and their text in Python.

A program is a list of calls of operators, each on inputs or on earlier results. `RECIPES` knows
how to call operators whose arguments must fit together; operators without a recipe are called
with tensors of one shape. Calls that an operator refuses are simply not taken, so a recipe may be
generous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph.ir import OPERATORS, Graph, Operator, TensorType, Value, trace_scope
from terrazzo.graph.trace import trace
from terrazzo.index import Index, Var
from terrazzo.ops import PUBLIC
from terrazzo.tools import samples

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64)
FLOATS = ("float32", "float32", "float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
MOST_ELEMENTS = 6000
LITERAL_ELEMENTS = 24  # arrays up to this size are written out in a reproducer


# ---------------------------------------------------------------- what a program is
@dataclass(frozen=True)
class Input:
    """One input: its type, and how its values are made."""

    shape: tuple[int, ...]
    dtype: str
    fill: str = "draw"  # a function of tools.samples; "ones"; "index"; or "literal"
    seed: int = 0
    below: int = 1  # for "index": the values are 0..below-1
    strided: bool = False
    literal: tuple[Any, ...] = ()

    def array(self) -> np.ndarray:
        """The values."""
        kind, rng = as_dtype(self.dtype), np.random.default_rng(self.seed)
        if self.fill == "ones":
            made = np.ones(self.shape, kind.np)
        elif self.fill == "index":
            made = rng.integers(0, max(self.below, 1), self.shape).astype(kind.np)
        elif self.fill == "literal":
            made = np.array(self.literal, kind.np).reshape(self.shape)
        else:
            made = np.asarray(getattr(samples, self.fill)(rng, self.shape, kind))
        return samples.strided(made, rng) if self.strided else made

    def text(self) -> str:
        """The values as a Python expression."""
        np_dtype = f"tz.{'bool_' if self.dtype == 'bool' else self.dtype}.np"
        if self.fill == "ones":
            return f"np.ones({self.shape}, {np_dtype})"
        if self.fill == "index":
            return (f"np.random.default_rng({self.seed}).integers(0, {max(self.below, 1)}, "
                    f"{self.shape}).astype({np_dtype})")
        if self.fill == "literal" or math.prod(self.shape) <= LITERAL_ELEMENTS:
            flat = replace(self, strided=False).array().reshape(-1)
            numbers = ", ".join(_number(n) for n in flat.tolist())
            return f"np.array([{numbers}], {np_dtype}).reshape({self.shape})"
        return (f"samples.{self.fill}(np.random.default_rng({self.seed}), {self.shape}, "
                f"tz.{'bool_' if self.dtype == 'bool' else self.dtype})")


def _number(n: Any) -> str:
    n = float(n) if not isinstance(n, (int, bool)) else n
    return f"np.{n}".replace("-", "").replace("np.", "-np." if n < 0 else "np.") if (
        isinstance(n, float) and not math.isfinite(n)) else repr(n)


@dataclass(frozen=True)
class Ref:
    """A value of a program: input number `at` (step None), or a result of a step."""

    at: int
    step: bool = False
    output: int = 0

    def name(self, several: Mapping[int, bool]) -> str:
        """How the text calls it."""
        if not self.step:
            return f"x{self.at}"
        return f"v{self.at}[{self.output}]" if several.get(self.at) else f"v{self.at}"


@dataclass(frozen=True)
class Step:
    """One call; arguments are references, numbers, None, or for variadic operators all of them."""

    op: str
    args: tuple[Any, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    several: bool = False  # answers with a tuple

    def refs(self) -> Iterator[Ref]:
        """The values it needs."""
        yield from (a for a in self.args if isinstance(a, Ref))


@dataclass(frozen=True)
class Program:
    """Inputs, calls and results."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Ref, ...]
    symbolic: bool = False
    gradient: bool = False

    def function(self, *values: Any) -> tuple[Any, ...]:
        """The program as a function of tensors."""
        results: list[Any] = []

        def resolve(arg: Any) -> Any:
            if not isinstance(arg, Ref):
                return arg
            if not arg.step:
                return values[arg.at]
            found = results[arg.at]
            return found[arg.output] if isinstance(found, (tuple, list)) else found

        for step in self.steps:
            results.append(call(step.op, [resolve(a) for a in step.args], dict(step.attrs)))
        return tuple(resolve(o) for o in self.outputs)

    def types(self) -> list[TensorType]:
        """The types to trace with; with `symbolic`, one dimension for each size over 1."""
        names: dict[int, Var] = {}

        def size(n: int) -> Index:
            if not self.symbolic or n < 2:
                return n
            return names.setdefault(n, Var(f"n{n}", 0))

        return [TensorType(tuple(map(size, i.shape)), as_dtype(i.dtype)) for i in self.inputs]

    def graph(self) -> Graph:
        """The traced graph."""
        return trace(self.function, self.types(), name="program")[0]

    def script(self, why: str) -> str:
        """A Python script that shows the failure."""
        several = {i: s.several for i, s in enumerate(self.steps)}
        lines = [f'"""{why}"""', "", "import numpy as np", ""]
        lines += ["import terrazzo as tz"]
        texts = [i.text() for i in self.inputs]
        if any("samples." in t for t in texts) or any(i.strided for i in self.inputs):
            lines.append("from terrazzo.tools import samples")
        lines += ["", "", f"def program({', '.join(f'x{i}' for i in range(len(self.inputs)))}):"]
        for i, step in enumerate(self.steps):
            lines.append(f"    v{i} = {_call_text(step, several)}")
        lines += [f"    return {', '.join(o.name(several) for o in self.outputs)}", "", ""]
        for i, (given, text) in enumerate(zip(self.inputs, texts, strict=True)):
            if given.strided:
                text = f"samples.strided({text}, np.random.default_rng({given.seed}))"
            lines.append(f"x{i} = {text}")
        kinds = ("given", "symbolic") if self.symbolic else ("given",)
        names = ", ".join(["program", *(f"x{i}" for i in range(len(self.inputs)))])
        levels = "" if self.gradient else ', levels=("graph", "expr", "loop", "code")'
        return "\n".join([*lines, f"print(tz.verify({names}, kinds={kinds}{levels}))", ""])


def _call_text(step: Step, several: Mapping[int, bool]) -> str:
    args = [a.name(several) if isinstance(a, Ref) else repr(a) for a in step.args]
    if step.op == "[]":
        return f"{args[0]}[{_key_text(dict(step.attrs)['key'])}]"
    named = [f"{k}={v!r}" for k, v in step.attrs]
    return f"tz.{step.op}({', '.join(args + named)})"


def _key_text(key: Sequence[Any]) -> str:
    parts = []
    for item in key:
        if isinstance(item, slice):
            ends = ["" if e is None else str(e) for e in (item.start, item.stop, item.step)]
            parts.append(":".join(ends))
        else:
            parts.append("..." if item is Ellipsis else str(item))
    return ", ".join(parts)


def call(op: str, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Call an operator by name; "[]" is a subscript."""
    if op == "[]":
        return args[0][tuple(attrs["key"])]
    return (PUBLIC.get(op) or OPERATORS[op])(*args, **attrs)


# ---------------------------------------------------------------- making programs
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
        shape = _ints(x)
        kind = dtype or x.dtype.name
        found = [v for v in self.values if v[1].dtype.name == kind and _fits(_ints(v[1]), shape)]
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


def _ints(x: Value) -> tuple[int, ...]:
    return tuple(int(n) for n in x.shape if isinstance(n, int))


def _modest(x: Value) -> bool:
    return math.prod(_ints(x)) <= 4 * MOST_ELEMENTS and not x.dtype.is_complex


def _fits(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1]))


Call = tuple[Sequence[Any], Mapping[str, Any]]
RECIPES: dict[str, Callable[[Maker], Call]] = {}


def recipe(*names: str) -> Callable[[Callable[[Maker], Call]], Callable[[Maker], Call]]:
    """Enter how to call some operators."""

    def enter(make: Callable[[Maker], Call]) -> Callable[[Maker], Call]:
        RECIPES.update(dict.fromkeys(names, make))
        return make

    return enter


def plain_call(op: str) -> Callable[[Maker], Call]:
    """Call an operator with tensors that broadcast together and its default attributes."""

    def make(m: Maker) -> Call:
        definition = OPERATORS[op]
        names = [p for p in definition.tensor_params if p.default is p.empty]
        bits = op.startswith("bitwise")
        first = m.value(lambda v: not v.dtype.is_float) if bits else m.value()
        args: list[Any] = [first[0]]
        for _ in names[1:]:
            if m.chance(0.15) and definition.unify and not bits:
                args.append(m.one([2, 0.5, -1, 3.0]))
            else:
                args.append(m.like(first[1])[0])
        return args, {}

    return make


# ---------------------------------------------------------------- elementwise, reductions
@recipe("where")
def _where(m: Maker) -> Call:
    x = m.value()
    return [m.like(x[1], "bool")[0], x[0], m.like(x[1])[0]], {}


@recipe("astype")
def _astype(m: Maker) -> Call:
    return [m.value()[0]], {"dtype": m.one((*FLOATS, *INTEGERS, "bool"))}


@recipe("bitcast")
def _bitcast(m: Maker) -> Call:
    source, result = m.one([("float32", "int32"), ("int32", "float32"), ("float64", "int64"),
                            ("float16", "int16"), ("uint8", "int8"), ("bfloat16", "uint16")])
    return [m.value(dtype=source)[0]], {"dtype": result}


@recipe("addcmul")
def _addcmul(m: Maker) -> Call:
    x = m.float()
    return [x[0], m.like(x[1])[0], m.like(x[1])[0]], {"value": m.one([1, 0.5, -2])}


@recipe("nan_to_num")
def _nan_to_num(m: Maker) -> Call:
    return [m.float()[0]], {"nan": m.one([0.0, 1.5]), "posinf": m.one([None, 3.0])}


@recipe("sum", "prod", "max", "min", "any", "all", "count_nonzero", "mean", "logsumexp",
        "vector_norm", "var", "std")
def _reduction(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape)
    return [x[0]], {"axis": m.axes(x[1]), "keepdims": m.chance(0.4)}


@recipe("argmax", "argmin")
def _arg_reduction(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    return [x[0]], {"axis": m.one([None, m.axis(x[1])]), "keepdims": m.chance(0.4)}


# ---------------------------------------------------------------- shapes
@recipe("full", "zeros", "ones", "arange", "eye", "random_key", "constant", "dimension")
def _creation(m: Maker) -> Call:
    raise NotApplicable


@recipe("reshape")
def _reshape(m: Maker) -> Call:
    x = m.value()
    count = math.prod(_ints(x[1]))
    shape, left = [], count
    for _ in range(m.number(0, 3)):
        divisors = [d for d in (2, 3, 4, 8, 11, 16, 17) if left and left % d == 0]
        shape.append(int(m.one([*divisors, 1])))
        left = left // shape[-1] if left else 0
    return [x[0]], {"shape": tuple([*shape, left])}


@recipe("flatten")
def _flatten(m: Maker) -> Call:
    x = m.value(least=2)
    start = m.number(0, x[1].ndim - 1)
    return [x[0]], {"start_axis": start, "end_axis": m.number(start, x[1].ndim - 1)}


@recipe("expand_dims")
def _expand(m: Maker) -> Call:
    x = m.value()
    return [x[0]], {"axis": m.number(-x[1].ndim - 1, x[1].ndim)}


@recipe("squeeze")
def _squeeze(m: Maker) -> Call:
    x = m.value(lambda v: 1 in v.shape)
    return [x[0]], {"axis": m.one([None, *(d for d, n in enumerate(x[1].shape) if n == 1)])}


@recipe("permute_dims", "transpose")
def _permute(m: Maker) -> Call:
    x = m.value(least=2)
    return [x[0]], {"axes": tuple(int(a) for a in m.rng.permutation(x[1].ndim))}


@recipe("swapaxes")
def _swapaxes(m: Maker) -> Call:
    x = m.value(least=2)
    return [x[0]], {"axis1": m.axis(x[1]), "axis2": m.axis(x[1])}


@recipe("moveaxis")
def _moveaxis(m: Maker) -> Call:
    x = m.value(least=2)
    return [x[0]], {"source": m.axis(x[1]), "destination": m.axis(x[1])}


@recipe("matrix_transpose", "tril", "triu")
def _matrix(m: Maker) -> Call:
    return [m.value(least=2)[0]], {}


@recipe("broadcast_to")
def _broadcast_to(m: Maker) -> Call:
    x = m.value()
    shape = [m.number(2, 5) if n == 1 and m.chance(0.7) else n for n in _ints(x[1])]
    return [x[0]], {"shape": tuple([m.number(1, 4)] * m.number(0, 2) + shape)}


@recipe("concat", "stack")
def _concat(m: Maker) -> Call:
    x = m.value(least=1)
    axis = m.axis(x[1])
    args = [x[0]]
    for _ in range(m.number(1, 3)):
        shape = list(_ints(x[1]))
        if m.chance(0.3):
            shape[axis] = m.size()
        args.append(x[0] if m.chance(0.2) else m.fresh(shape, x[1].dtype.name)[0])
    return args, {"axis": axis}


@recipe("slice")
def _slice(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    starts, stops, steps = [], [], []
    for n in _ints(x[1]):
        start = m.number(0, n - 1)
        starts.append(start)
        stops.append(m.number(start, n))
        steps.append(m.one([1, 1, 2, 3]))
    return [x[0]], {"starts": tuple(starts), "stops": tuple(stops), "steps": tuple(steps)}


@recipe("[]")
def _getitem(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    key: list[Any] = []
    for n in _ints(x[1])[:m.number(1, x[1].ndim)]:
        low = m.number(0, n - 1)
        key.append(m.one([low, slice(None), slice(low, None), slice(None, None, -1),
                          slice(low, m.number(low, n), m.number(1, 3)), -1, None]))
    return [x[0]], {"key": tuple(key)}


@recipe("split")
def _split(m: Maker) -> Call:
    x = m.value(least=1)
    axis = m.axis(x[1])
    n = _ints(x[1])[axis]
    return [x[0]], {"indices_or_sections": m.one([1, 2, (n // 2,), (n // 3, n // 2)]),
                    "axis": axis}


@recipe("unstack")
def _unstack(m: Maker) -> Call:
    x = m.value(lambda v: v.ndim > 0 and 0 < _ints(v)[0] <= 5, least=1)
    return [x[0]], {"axis": 0}


@recipe("pad")
def _pad(m: Maker) -> Call:
    x = m.value(least=1)
    widths = tuple((m.number(0, 3), m.number(0, 3)) for _ in x[1].shape)
    return [x[0]], {"pad_width": widths,
                    "mode": m.one(["constant", "constant", "edge", "reflect", "wrap"])}


@recipe("flip")
def _flip(m: Maker) -> Call:
    x = m.value(least=1)
    return [x[0]], {"axis": m.axes(x[1])}


@recipe("roll")
def _roll(m: Maker) -> Call:
    x = m.value(least=1)
    return [x[0]], {"shift": m.number(-5, 5), "axis": m.one([None, m.axis(x[1])])}


@recipe("tile")
def _tile(m: Maker) -> Call:
    x = m.value()
    return [x[0]], {"repetitions": tuple(m.number(1, 3) for _ in range(max(x[1].ndim, 1)))}


@recipe("repeat")
def _repeat(m: Maker) -> Call:
    x = m.value(least=1)
    return [x[0]], {"repeats": m.number(1, 3), "axis": m.one([None, m.axis(x[1])])}


@recipe("sliding_window")
def _window(m: Maker) -> Call:
    x = m.value(least=1)
    return [x[0]], {"size": m.number(1, 4), "step": m.number(1, 3), "axis": m.axis(x[1])}


@recipe("diagonal")
def _diagonal(m: Maker) -> Call:
    return [m.value(least=2)[0]], {"offset": m.number(-2, 2)}


# ---------------------------------------------------------------- activations, norms, losses
@recipe("clip")
def _clip(m: Maker) -> Call:
    return [m.value()[0], m.one([None, -1, 0]), m.one([2, 1, 5])], {}


@recipe("threshold")
def _threshold(m: Maker) -> Call:
    return [m.float()[0]], {"threshold": 0.5, "value": -1.0}


@recipe("gelu")
def _gelu(m: Maker) -> Call:
    return [m.float()[0]], {"approximate": m.one(["none", "tanh"])}


@recipe("glu", "swiglu")
def _glu(m: Maker) -> Call:
    x = m.value(lambda v: v.dtype.is_float and v.ndim > 0 and _ints(v)[-1] % 2 == 0, least=1)
    return [x[0]], {}


@recipe("softmax", "safe_softmax", "log_softmax")
def _softmax(m: Maker) -> Call:
    x = m.float(least=1)
    return [x[0]], {"axis": m.axis(x[1])}


@recipe("layer_norm", "rms_norm")
def _layer_norm(m: Maker) -> Call:
    x = m.float(least=1)
    kind, last = x[1].dtype.name, _ints(x[1])[-1:]
    weight = m.fresh(last, kind, "draw")[0] if m.chance(0.7) else None
    return [x[0], weight], {}


@recipe("group_norm", "instance_norm", "batch_norm_train")
def _group_norm(m: Maker) -> Call:
    shape = (m.number(1, 3), m.one([2, 4, 6]), m.one([3, 4, 5]), m.one([4, 7]))
    x = m.fresh(shape, m.float_type(), "draw")
    weights = [m.fresh(shape[1:2], x[1].dtype.name, "draw")[0] for _ in range(2)]
    return [x[0], *weights], {"groups": 2} if m.chance(0.34) else {}


@recipe("batch_norm")
def _batch_norm(m: Maker) -> Call:
    x = m.float(least=2)
    channels = _ints(x[1])[1:2]
    mean, weight, bias = (m.fresh(channels, x[1].dtype.name, "draw")[0] for _ in range(3))
    return [x[0], mean, m.fresh(channels, x[1].dtype.name, "ones")[0], weight, bias], {}


@recipe("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "binary_cross_entropy_with_logits")
def _loss(m: Maker) -> Call:
    x = m.value(lambda v: v.dtype.is_float and 0 not in v.shape, least=1)
    y = m.fresh(_ints(x[1]), x[1].dtype.name, "draw")
    return [x[0], y[0]], {"reduction": m.one(["mean", "sum", "none"])}


@recipe("binary_cross_entropy")
def _binary_cross_entropy(m: Maker) -> Call:
    shape, kind = m.shape(1), m.float_type()
    return [m.fresh(shape, kind, "unit")[0], m.fresh(shape, kind, "unit")[0]], {}


@recipe("cross_entropy", "nll_loss")
def _cross_entropy(m: Maker) -> Call:
    x = m.value(lambda v: v.dtype.is_float and v.ndim == 2 and 0 not in v.shape, least=2)
    rows, classes = (*_ints(x[1]), 1, 1)[:2]
    target = m.fresh((rows,), "int64", "index", classes)
    return [x[0], target[0]], {"reduction": m.one(["mean", "sum", "none"])}


# ---------------------------------------------------------------- products
@recipe("matmul", "batch_matmul")
def _matmul(m: Maker) -> Call:
    x = m.value(lambda v: v.dtype.is_float or m.chance(0.2), least=2)
    k = _ints(x[1])[-1]
    leading = _ints(x[1])[:-2] if m.chance(0.5) else ()
    y = m.fresh((*leading, k, m.size()), x[1].dtype.name)
    return [x[0], y[0]], {}


@recipe("linear")
def _linear(m: Maker) -> Call:
    x = m.float(least=1)
    out = max(m.size(), 1)
    weight = m.fresh((out, _ints(x[1])[-1]), x[1].dtype.name)
    bias = m.fresh((out,), x[1].dtype.name)[0] if m.chance(0.6) else None
    return [x[0], weight[0], bias], {}


@recipe("vecdot", "dot")
def _vecdot(m: Maker) -> Call:
    x = m.float(least=1)
    return [x[0], m.fresh(_ints(x[1])[-1:], x[1].dtype.name)[0]], {}


@recipe("outer")
def _outer(m: Maker) -> Call:
    kind = m.float_type()
    return [m.fresh((m.size(),), kind)[0], m.fresh((m.size(),), kind)[0]], {}


@recipe("tensordot")
def _tensordot(m: Maker) -> Call:
    x = m.float(least=2)
    y = m.fresh((*_ints(x[1])[-2:], m.number(1, 4)), x[1].dtype.name)
    return [x[0], y[0]], {"axes": 2}


@recipe("einsum")
def _einsum(m: Maker) -> Call:
    equation, shapes = m.one([
        ("bij,bjk->bik", ((2, 3, 5), (2, 5, 4))), ("ij,j->i", ((7, 5), (5,))),
        ("ij,ij->", ((4, 9), (4, 9))), ("ii->i", ((6, 6),)), ("ijk->kji", ((2, 3, 4),)),
        ("bhid,bhjd->bhij", ((2, 2, 5, 4), (2, 2, 3, 4))),
    ])
    kind = m.float_type()
    return [equation, *(m.fresh(s, kind)[0] for s in shapes)], {}


@recipe("scaled_dot_product_attention")
def _attention(m: Maker) -> Call:
    kind = m.float_type()
    heads, rows, columns, width = m.number(1, 3), m.size(), max(m.size(), 1), m.one([4, 8, 17])
    q = m.fresh((2, heads, rows, width), kind, "draw")
    k, v = (m.fresh((2, heads, columns, width), kind, "draw") for _ in range(2))
    return [q[0], k[0], v[0]], {"causal": m.chance(0.4)}


# ---------------------------------------------------------------- indices, scans, sorting, random
@recipe("take")
def _take(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    axis = m.axis(x[1])
    indices = m.fresh(m.shape(0, 2), m.one(["int64", "int32"]), "index", _ints(x[1])[axis])
    return [x[0], indices[0]], {"axis": axis}


@recipe("gather", "take_along_axis")
def _gather(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    axis = m.axis(x[1])
    shape = list(_ints(x[1]))
    below, shape[axis] = shape[axis], m.number(1, 6)
    return [x[0], m.fresh(shape, "int64", "index", below)[0]], {"axis": axis}


@recipe("embedding")
def _embedding(m: Maker) -> Call:
    table = m.fresh((m.number(1, 20), m.number(1, 9)), m.float_type())
    return [table[0], m.fresh(m.shape(0, 2), "int64", "index", _ints(table[1])[0])[0]], {}


@recipe("one_hot")
def _one_hot(m: Maker) -> Call:
    return [m.fresh(m.shape(0, 2), "int64", "index", 5)[0]], {"num_classes": 5}


@recipe("scatter", "index_update")
def _scatter(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    shape = list(_ints(x[1]))
    below, shape[0] = shape[0], m.number(1, 5)
    updates = m.fresh(shape, x[1].dtype.name, "draw")
    # Several updates of one place may be applied in any order, so only sums are well defined.
    return [x[0], m.fresh(shape, "int64", "index", below)[0], updates[0]], {
        "axis": 0, "reduce": "add"}


@recipe("masked_fill")
def _masked_fill(m: Maker) -> Call:
    x = m.value()
    return [x[0], m.like(x[1], "bool")[0], m.one([0, -1.0, 7])], {}


@recipe("bincount")
def _bincount(m: Maker) -> Call:
    return [m.fresh((m.size(),), "int64", "index", 9)[0]], {"length": 9}


@recipe("cumsum", "cumprod", "cummax", "cummin")
def _scan(m: Maker) -> Call:
    x = m.value(least=1)
    return [x[0]], {"axis": m.axis(x[1]), "reverse": m.chance(0.3)}


@recipe("sort", "argsort")
def _sort(m: Maker) -> Call:
    x = m.value(least=1)
    return [x[0]], {"axis": m.axis(x[1]), "descending": m.chance(0.4)}


@recipe("topk")
def _topk(m: Maker) -> Call:
    x = m.value(lambda v: v.ndim > 0 and _ints(v)[-1] > 0, least=1)
    return [x[0]], {"k": m.number(1, _ints(x[1])[-1]), "largest": m.chance(0.7)}


@recipe("uniform", "normal", "bernoulli")
def _random(m: Maker) -> Call:
    return [m.fresh((), "int64", "index", 1000)[0]], {"shape": m.shape(0, 2)}


@recipe("dropout")
def _dropout(m: Maker) -> Call:
    return [m.float()[0], m.fresh((), "int64", "index", 1000)[0]], {"p": 0.5}


class NotApplicable(Exception):
    """A recipe has nothing to offer."""


# Building blocks that users do not call, graphs as attributes, and results whose order is free.
LEFT_OUT = {
    "cond", "while_loop", "scan", "getitem", "take_at", "scatter_at", "place", "cumulative",
    "linear_recurrence", "sort_pairs", "top_pairs", "random_bits", "split_key", "fold_in",
    "permutation", "randint", "nonzero", "gather_nd", "scatter_nd", "searchsorted", "meshgrid",
    "full_like", "diag", "binary_entropy", "stop_gradient", "tree_ensemble", "pairwise_coupling",
}  # fmt: skip


def operators() -> list[str]:
    """The operators that programs are made of."""
    known = [n for n, o in OPERATORS.items() if n not in LEFT_OUT and _built_in(o)]
    return [*known, "[]"]


def _built_in(op: Operator) -> bool:
    """Whether an operator is ours: what users define must not change the programs of a seed."""
    definition = op.body or op.expr or op.loops or op.reference
    return getattr(definition, "__module__", "").startswith("terrazzo.")


def random_program(rng: np.random.Generator, names: Sequence[str] | None = None) -> Program:
    """A program of a few operators."""
    maker = Maker(rng)
    names = names or operators()
    wanted = int(rng.integers(1, 9))
    for _ in range(6 * wanted):
        name = maker.one(names)
        before = len(maker.inputs), len(maker.values)
        try:
            args, attrs = RECIPES.get(name, plain_call(name))(maker)
        except (NotApplicable, KeyError):
            continue
        if not maker.add(name, args, attrs):
            del maker.inputs[before[0]:], maker.values[before[1]:]
        if len(maker.steps) >= wanted:
            break
    refs = [r for r, _ in maker.values if r.step]
    used = {r for s in maker.steps for r in s.refs()}
    outputs = [r for r in refs if r not in used] or refs[-1:]
    outputs += [r for r in refs if r in used and maker.chance(0.15)]
    program = Program(tuple(maker.inputs), tuple(maker.steps), tuple(outputs[:4]),
                      symbolic=maker.chance(0.15), gradient=maker.chance(0.15))
    return pruned(program)


def pruned(program: Program) -> Program:
    """The program without what no output needs."""
    needed: set[Ref] = set(program.outputs)
    kept: list[int] = []
    for i in reversed(range(len(program.steps))):
        if any(r.step and r.at == i for r in needed):
            kept.append(i)
            needed.update(program.steps[i].refs())
    kept.reverse()
    steps = {old: new for new, old in enumerate(kept)}
    used = sorted({r.at for r in needed if not r.step})
    inputs = {old: new for new, old in enumerate(used)}

    def moved(arg: Any) -> Any:
        if not isinstance(arg, Ref):
            return arg
        return replace(arg, at=steps[arg.at] if arg.step else inputs[arg.at])

    return replace(
        program, inputs=tuple(program.inputs[i] for i in used),
        steps=tuple(replace(program.steps[i], args=tuple(map(moved, program.steps[i].args)))
                    for i in kept),
        outputs=tuple(dict.fromkeys(moved(o) for o in program.outputs)))
