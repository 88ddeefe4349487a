"""How operators are called whose arguments must fit together.

Operators without a recipe are called with tensors of one shape. Calls that an operator refuses are
simply not taken, so a recipe may be generous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.graph.ir import OPERATORS
from terrazzo.tools.fuzz.maker import FLOATS, INTEGERS, Maker, ints

Call = tuple[Sequence[Any], Mapping[str, Any]]
RECIPES: dict[str, Callable[[Maker], Call]] = {}


class NotApplicable(Exception):
    """A recipe has nothing to offer."""


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
    count = math.prod(ints(x[1]))
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
    shape = [m.number(2, 5) if n == 1 and m.chance(0.7) else n for n in ints(x[1])]
    return [x[0]], {"shape": tuple([m.number(1, 4)] * m.number(0, 2) + shape)}


@recipe("concat", "stack")
def _concat(m: Maker) -> Call:
    x = m.value(least=1)
    axis = m.axis(x[1])
    args = [x[0]]
    for _ in range(m.number(1, 3)):
        shape = list(ints(x[1]))
        if m.chance(0.3):
            shape[axis] = m.size()
        args.append(x[0] if m.chance(0.2) else m.fresh(shape, x[1].dtype.name)[0])
    return args, {"axis": axis}


@recipe("slice")
def _slice(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    starts, stops, steps = [], [], []
    for n in ints(x[1]):
        start = m.number(0, n - 1)
        starts.append(start)
        stops.append(m.number(start, n))
        steps.append(m.one([1, 1, 2, 3]))
    return [x[0]], {"starts": tuple(starts), "stops": tuple(stops), "steps": tuple(steps)}


@recipe("[]")
def _getitem(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    key: list[Any] = []
    for n in ints(x[1])[:m.number(1, x[1].ndim)]:
        low = m.number(0, n - 1)
        key.append(m.one([low, slice(None), slice(low, None), slice(None, None, -1),
                          slice(low, m.number(low, n), m.number(1, 3)), -1, None]))
    return [x[0]], {"key": tuple(key)}


@recipe("split")
def _split(m: Maker) -> Call:
    x = m.value(least=1)
    axis = m.axis(x[1])
    n = ints(x[1])[axis]
    return [x[0]], {"indices_or_sections": m.one([1, 2, (n // 2,), (n // 3, n // 2)]),
                    "axis": axis}


@recipe("unstack")
def _unstack(m: Maker) -> Call:
    x = m.value(lambda v: v.ndim > 0 and 0 < ints(v)[0] <= 5, least=1)
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
    x = m.value(lambda v: v.dtype.is_float and v.ndim > 0 and ints(v)[-1] % 2 == 0, least=1)
    return [x[0]], {}


@recipe("softmax", "safe_softmax", "log_softmax")
def _softmax(m: Maker) -> Call:
    x = m.float(least=1)
    return [x[0]], {"axis": m.axis(x[1])}


@recipe("layer_norm", "rms_norm")
def _layer_norm(m: Maker) -> Call:
    x = m.float(least=1)
    kind, last = x[1].dtype.name, ints(x[1])[-1:]
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
    channels = ints(x[1])[1:2]
    mean, weight, bias = (m.fresh(channels, x[1].dtype.name, "draw")[0] for _ in range(3))
    return [x[0], mean, m.fresh(channels, x[1].dtype.name, "ones")[0], weight, bias], {}


@recipe("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "binary_cross_entropy_with_logits")
def _loss(m: Maker) -> Call:
    x = m.value(lambda v: v.dtype.is_float and 0 not in v.shape, least=1)
    y = m.fresh(ints(x[1]), x[1].dtype.name, "draw")
    return [x[0], y[0]], {"reduction": m.one(["mean", "sum", "none"])}


@recipe("binary_cross_entropy")
def _binary_cross_entropy(m: Maker) -> Call:
    shape, kind = m.shape(1), m.float_type()
    return [m.fresh(shape, kind, "unit")[0], m.fresh(shape, kind, "unit")[0]], {}


@recipe("cross_entropy", "nll_loss")
def _cross_entropy(m: Maker) -> Call:
    x = m.value(lambda v: v.dtype.is_float and v.ndim == 2 and 0 not in v.shape, least=2)
    rows, classes = (*ints(x[1]), 1, 1)[:2]
    target = m.fresh((rows,), "int64", "index", classes)
    return [x[0], target[0]], {"reduction": m.one(["mean", "sum", "none"])}


# ---------------------------------------------------------------- products
@recipe("matmul", "batch_matmul")
def _matmul(m: Maker) -> Call:
    x = m.value(lambda v: v.dtype.is_float or m.chance(0.2), least=2)
    k = ints(x[1])[-1]
    leading = ints(x[1])[:-2] if m.chance(0.5) else ()
    y = m.fresh((*leading, k, m.size()), x[1].dtype.name)
    return [x[0], y[0]], {}


@recipe("linear")
def _linear(m: Maker) -> Call:
    x = m.float(least=1)
    out = max(m.size(), 1)
    weight = m.fresh((out, ints(x[1])[-1]), x[1].dtype.name)
    bias = m.fresh((out,), x[1].dtype.name)[0] if m.chance(0.6) else None
    return [x[0], weight[0], bias], {}


@recipe("vecdot", "dot")
def _vecdot(m: Maker) -> Call:
    x = m.float(least=1)
    return [x[0], m.fresh(ints(x[1])[-1:], x[1].dtype.name)[0]], {}


@recipe("outer")
def _outer(m: Maker) -> Call:
    kind = m.float_type()
    return [m.fresh((m.size(),), kind)[0], m.fresh((m.size(),), kind)[0]], {}


@recipe("tensordot")
def _tensordot(m: Maker) -> Call:
    x = m.float(least=2)
    y = m.fresh((*ints(x[1])[-2:], m.number(1, 4)), x[1].dtype.name)
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


@recipe("scaled_dot_product_attention", "attention_with_logsumexp")
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
    indices = m.fresh(m.shape(0, 2), m.one(["int64", "int32"]), "index", ints(x[1])[axis])
    return [x[0], indices[0]], {"axis": axis}


@recipe("gather", "take_along_axis")
def _gather(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    axis = m.axis(x[1])
    shape = list(ints(x[1]))
    below, shape[axis] = shape[axis], m.number(1, 6)
    return [x[0], m.fresh(shape, "int64", "index", below)[0]], {"axis": axis}


@recipe("embedding")
def _embedding(m: Maker) -> Call:
    table = m.fresh((m.number(1, 20), m.number(1, 9)), m.float_type())
    return [table[0], m.fresh(m.shape(0, 2), "int64", "index", ints(table[1])[0])[0]], {}


@recipe("one_hot")
def _one_hot(m: Maker) -> Call:
    return [m.fresh(m.shape(0, 2), "int64", "index", 5)[0]], {"num_classes": 5}


@recipe("scatter", "index_update")
def _scatter(m: Maker) -> Call:
    x = m.value(lambda v: 0 not in v.shape, least=1)
    shape = list(ints(x[1]))
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
    x = m.value(lambda v: v.ndim > 0 and ints(v)[-1] > 0, least=1)
    return [x[0]], {"k": m.number(1, ints(x[1])[-1]), "largest": m.chance(0.7)}


@recipe("uniform", "normal", "bernoulli")
def _random(m: Maker) -> Call:
    return [m.fresh((), "int64", "index", 1000)[0]], {"shape": m.shape(0, 2)}


@recipe("dropout")
def _dropout(m: Maker) -> Call:
    return [m.float()[0], m.fresh((), "int64", "index", 1000)[0]], {"p": 0.5}
