"""Operators that the host runs in numpy between compiled parts.

They are those whose results have as many elements as the contents of a tensor say, and those that
work on what is no tensor of numbers: sequences (Python lists), optionals (the value, or None) and
strings (arrays of objects).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.errors import IndexOutOfRange, ModelError, TerrazzoError
from terrazzo.frontends.onnx.session.re2 import python_pattern
from terrazzo.ops.boxes import non_max_suppression_padded

Attrs = Mapping[str, Any]
# (attributes of the node, version of its domain, inputs with None for those left out) -> outputs
HostOp = Callable[[Attrs, int, Sequence[Any]], list[Any]]

HOST_OPS: dict[tuple[str, str], HostOp] = {}
PLAIN: dict[tuple[str, str], HostOp] = {}  # the same, with errors as Python has them
MAKERS: set[tuple[str, str]] = set()  # those whose results are new in every run
STEADY: set[tuple[str, str]] = set()  # those whose results' layouts hang on the inputs' alone
TELLERS: set[tuple[str, str]] = set()  # those whose results hang on the inputs' layouts alone


def host_op(*operators: str, domain: str = "", makes: bool = False, steady: bool = False,
            tells: bool = False) -> Callable[[HostOp], HostOp]:
    """Enter a function under the names of operators; what numpy rejects is the model's mistake.

    One that `makes` its results hands on nothing that it was given or keeps. One that is `steady`
    answers inputs of the same types and shapes with results that lie alike, and one that `tells`
    of them with equal results.
    """

    def register(function: HostOp) -> HostOp:
        for operator in operators:
            def run(attrs: Attrs, version: int, inputs: Sequence[Any],
                    operator: str = operator) -> list[Any]:
                try:
                    return function(attrs, version, inputs)
                except TerrazzoError:
                    raise
                except (ValueError, IndexError, TypeError, AttributeError, re.error) as error:
                    raise ModelError(f"{operator} cannot work with what it is given: {error}"
                                     ) from error

            HOST_OPS[domain, operator], PLAIN[domain, operator] = run, function
            for holds, those in ((makes, MAKERS), (steady, STEADY), (tells, TELLERS)):
                if holds:
                    those.add((domain, operator))
        return function

    return register


class NodeAttributes(dict[str, Any]):
    """The attributes of one node, and what was made of them once for all runs."""

    def __init__(self, attrs: Attrs, outputs: int = 1):
        super().__init__(attrs)
        self.outputs = outputs  # how many the node has
        self.made: dict[str, Any] = {}


def once(attrs: Attrs, name: str, make: Callable[[], Any]) -> Any:
    """What is made of the attributes alone: kept under a name, where there is a node to keep it."""
    if not isinstance(attrs, NodeAttributes):
        return make()
    if name not in attrs.made:
        attrs.made[name] = make()
    return attrs.made[name]


def outputs_of(attrs: Attrs) -> int:
    """How many outputs the node has whose attributes these are."""
    return attrs.outputs if isinstance(attrs, NodeAttributes) else 1


def given(inputs: Sequence[Any], i: int) -> Any:
    """An input, or None where it is left out."""
    return inputs[i] if i < len(inputs) else None


def number(value: Any, default: Any = None) -> Any:
    """The one element of a tensor."""
    return default if value is None or np.size(value) == 0 else np.reshape(value, -1)[0]


# ---------------------------------------------------------------- as many as there are
# Axes of each output whose size the contents decide; "axis" stands for the attribute.
_COUNTED: dict[str, list[list[int | str]]] = {
    "NonZero": [[1]], "Compress": [["axis"]], "Unique": [["axis"], [0], [], [0]],
    "NonMaxSuppression": [[0]], "Range": [[0]],
}


def counted_axes(node: Any) -> dict[str, list[int]]:
    """The axes of a node's outputs whose sizes hang on contents of its inputs."""
    given = next((a.i for a in node.attribute if a.name == "axis"), 0)
    return {name: [given if isinstance(a, str) else a for a in axes]
            for name, axes in zip(node.output, _COUNTED.get(node.op_type, []), strict=False)
            if name and axes}


@host_op("NonZero")
def _non_zero(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    if x.ndim == 1:
        return [x.nonzero()[0][None]]
    return [np.array(np.nonzero(np.atleast_1d(x)), np.int64)[:x.ndim]]  # a scalar: no row


@host_op("Compress")
def _compress(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x, condition = np.asarray(inputs[0]), np.asarray(inputs[1]).reshape(-1)
    axis = attrs.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    return [x.compress(condition, axis)]


@host_op("Unique")
def _unique(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x, axis = np.asarray(inputs[0]), attrs.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    # Without an axis for numpy elements are compared by themselves, also of types it cannot cut.
    by_axis = x.ndim > 1
    words: Any = None
    if by_axis and x.dtype.kind == "O":
        words, ranks = np.unique(x, return_inverse=True)
        x = ranks.reshape(x.shape)
    found, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True,
        axis=axis if by_axis else None)
    found, inverse = found if words is None else words[found], inverse.reshape(-1)
    if not attrs.get("sorted", 1):
        order = np.argsort(first, kind="stable")
        found, first, counts = np.take(found, order, axis=axis), first[order], counts[order]
        inverse = np.argsort(order, kind="stable")[inverse]
    return [found, *(a.astype(np.int64) for a in (first, inverse, counts))]


@host_op("Range", domain="com.microsoft")
@host_op("Range")
def _range(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    dtype = np.asarray(inputs[0]).dtype
    kind: Any = int if dtype.kind in "iu" else float
    start, limit = (kind(number(i)) for i in inputs[:2])
    delta = kind(number(given(inputs, 2), 1))  # com.microsoft's may leave it out
    if delta == 0:
        raise ModelError("Range has a delta of 0, and would never end")
    count = max(0, -((start - limit) // delta) if kind is int else
                int(np.ceil((limit - start) / delta)))
    return [(start + np.arange(count) * delta).astype(dtype)]


# ---------------------------------------------------------------- boxes
@host_op("NonMaxSuppression")
def _non_max_suppression(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    boxes, scores = np.asarray(inputs[0]), np.asarray(inputs[1])
    limits = [None if i is None else np.asarray(i) for i in inputs[2:]]
    most = int(number(given(inputs, 2), 0))
    # The first of many are also the first of more: one program serves similar numbers.
    room = 1 << (min(max(most, 1), scores.shape[-1]) - 1).bit_length()
    rows, count = non_max_suppression_padded(
        boxes, scores, *limits, most=room, center_point_box=bool(attrs.get("center_point_box", 0)))
    return [rows[:int(count)]]


# ---------------------------------------------------------------- sequences
def _place(position: Any, count: int, last: int) -> int:
    """A position in a sequence, counted from the back if negative, up to `last`."""
    at = int(number(position))
    if not -count <= at <= last:
        raise IndexOutOfRange(f"position {at} is outside a sequence of {count}")
    return at + count if at < 0 else at


@host_op("SequenceEmpty")
def _sequence_empty(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [[]]


@host_op("SequenceConstruct")
def _sequence_construct(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [list(inputs)]


@host_op("SequenceAt")
def _sequence_at(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    items, position = inputs
    return [items[_place(position, len(items), len(items) - 1)]]


@host_op("SequenceInsert")
def _sequence_insert(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    items, tensor, position = list(inputs[0]), inputs[1], given(inputs, 2)
    items.insert(len(items) if position is None else _place(position, len(items), len(items)),
                 tensor)
    return [items]


@host_op("SequenceErase")
def _sequence_erase(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    items, position = list(inputs[0]), given(inputs, 1)
    del items[_place(-1 if position is None else position, len(items), len(items) - 1)]
    return [items]


@host_op("SequenceLength")
def _sequence_length(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [np.array(len(inputs[0]), np.int64)]


@host_op("SplitToSequence")
def _split_to_sequence(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x, split, axis = np.asarray(inputs[0]), given(inputs, 1), attrs.get("axis", 0)
    n = x.shape[axis]
    if split is None:
        parts = np.split(x, n, axis=axis) if n else []
        if not attrs.get("keepdims", 1):
            parts = [np.squeeze(p, axis=axis) for p in parts]
        return [parts]
    if np.ndim(split) == 0:
        cuts = list(range(int(split), n, int(split)))
    else:
        sizes = np.asarray(split)
        if sizes.sum() != n or (sizes < 0).any():
            raise ModelError(f"SplitToSequence cuts {n} elements into parts {sizes.tolist()}")
        cuts = np.cumsum(sizes)[:-1].tolist()
    return [np.split(x, cuts, axis=axis)]


@host_op("ConcatFromSequence")
def _concat_from_sequence(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    join = np.stack if attrs.get("new_axis", 0) else np.concatenate
    return [join(inputs[0], axis=attrs["axis"])]


# ---------------------------------------------------------------- optionals
@host_op("Optional")
def _optional(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [given(inputs, 0)]


@host_op("OptionalHasElement")
def _optional_has_element(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [np.array(given(inputs, 0) is not None)]


@host_op("OptionalGetElement")
def _optional_get_element(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    if inputs[0] is None:
        raise ModelError("OptionalGetElement is given an optional that is empty")
    return [inputs[0]]


@host_op("Identity")
def _identity(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [inputs[0]]


# ---------------------------------------------------------------- strings
@host_op("Constant")
def _constant(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    ((name, value),) = attrs.items()
    is_text = name in ("value_string", "value_strings")
    return [np.asarray(value, object) if is_text else np.asarray(value)]


@host_op("Equal")
def _equal(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [np.asarray(np.equal(*(np.asarray(i, object) for i in inputs)), bool)]


def _each_string(function: Callable[..., Any], *inputs: Any) -> np.ndarray:
    """A function of strings, applied to all that broadcast together."""
    made = np.frompyfunc(function, len(inputs), 1)(*(np.asarray(i, object) for i in inputs))
    return np.asarray(made, object)


@host_op("StringConcat")
def _string_concat(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    return [_each_string(lambda x, y: x + y, *inputs)]


@host_op("StringSplit")
def _string_split(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x, delimiter = np.asarray(inputs[0], object), attrs.get("delimiter") or None
    texts = x.reshape(-1).tolist()
    if delimiter is None:  # Python leaves the blanks at the end to the rest that is not split
        texts = list(map(str.rstrip, texts))
    pieces = [text.split(delimiter, attrs.get("maxsplit", -1)) if text else [] for text in texts]
    longest = max(map(len, pieces), default=0)
    padded = np.array([p + [""] * (longest - len(p)) for p in pieces], object)
    return [padded.reshape(*x.shape, longest),
            np.array([len(p) for p in pieces], np.int64).reshape(x.shape)]


@host_op("RegexFullMatch")
def _regex_full_match(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    pattern = once(attrs, "pattern", lambda: re.compile(python_pattern(attrs["pattern"])))
    return [_each_string(lambda text: pattern.fullmatch(text) is not None, inputs[0]).astype(bool)]


_CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


@host_op("StringNormalizer")
def _string_normalizer(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0], object)
    if x.ndim not in (1, 2) or x.shape[:-1] not in ((), (1,)):
        raise ModelError(f"StringNormalizer takes strings of shape [C] or [1, C], not {x.shape}")
    case, compared, stopped = once(attrs, "rules", lambda: _normalizing(attrs))
    texts = x.tolist() if x.ndim == 1 else x[0].tolist()
    if stopped:
        texts = [text for text in texts if compared(text) not in stopped]
    made = np.array(list(map(case, texts)) or [""], object)
    return [made if x.ndim == 1 else made.reshape(1, -1)]


def _normalizing(attrs: Attrs) -> tuple[Callable[[str], str], Callable[[str], str], set[str]]:
    """What becomes of a string, how it is compared with those that are dropped, and those."""
    compared: Callable[[str], str] = str if attrs.get("is_case_sensitive", 0) else str.lower
    return _CASES[attrs.get("case_change_action", "NONE")], compared, {
        compared(w) for w in attrs.get("stopwords", ())}
