"""Which function converts which ONNX operator, and what such a function gets to see.

    @converts("Clip")                       # every version, unless `since`/`until` narrow it
    def clip(call: Call) -> Value:
        return tz_clip(call.value(0), ...)

    ELEMENTWISE = {"Exp": exp, ...}; converts_each(ELEMENTWISE)

A converter answers with one value or a tuple of values, in the order of the node's outputs. It
says `call.unsupported("why")` for what it cannot do; whoever places nodes then looks for another
way, and the reason is shown to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from terrazzo.dtypes import DType
from terrazzo.errors import UnsupportedOperator
from terrazzo.frontends.onnx.model import node_text, sparse_array, tensor_array
from terrazzo.frontends.onnx.reasons import NeedsValue
from terrazzo.frontends.onnx.types import dtype_of
from terrazzo.graph.ir import Operator, Value
from terrazzo.index import Index, IndexExpr

if TYPE_CHECKING:
    from terrazzo.frontends.onnx.importer import Importer

Result = Value | Sequence[Value | None]
MICROSOFT = "com.microsoft"
OWN = "terrazzo"  # the domain of operators of ours that ONNX has none for


@dataclass(frozen=True)
class Converter:
    """A function that converts nodes of one operator, for a range of versions."""

    function: Callable[[Call], Result]
    since: int = 1
    until: int = 1 << 30  # exclusive


_CONVERTERS: dict[tuple[str, str], list[Converter]] = {}


def converts(*operators: str, domain: str = "", since: int = 1, until: int = 1 << 30
             ) -> Callable[[Callable[[Call], Result]], Callable[[Call], Result]]:
    """Register a function as the converter of some operators."""

    def register(function: Callable[[Call], Result]) -> Callable[[Call], Result]:
        for operator in operators:
            known = _CONVERTERS.setdefault((domain, operator), [])
            known.append(Converter(function, since, until))
        return function

    return register


def converts_each(table: Mapping[str, Callable[..., Any]], domain: str = "") -> None:
    """Register operators that take their inputs as they come, and no attributes."""
    for operator, function in table.items():
        converts(operator, domain=domain)(partial(_as_it_comes, function))


def _as_it_comes(function: Callable[..., Any], call: Call) -> Result:
    return function(*call.values())


def converts_operator(operator: Operator, domain: str, name: str = "") -> None:
    """Register an operator of ours as that of a domain, inputs by place, attributes by name.

    An input that a node leaves out is the parameter's default.
    """
    allowed = {p.name for p in operator.attr_params}
    defaults = [None if p.default is p.empty else p.default for p in operator.tensor_params]

    def convert(call: Call) -> Result:
        names = [a.name for a in call.node.attribute]
        unknown = [n for n in names if n not in allowed]
        if unknown:
            call.unsupported(f"has the attribute {unknown[0]!r}, which {operator!r} does not take")
        attrs = {n: call.attr(n) for n in names}
        inputs = [call.optional(i) for i in range(len(call))]
        if operator.variadic:
            return operator(inputs, **attrs)
        return operator(*(default if value is None else value for value, default in
                          zip_longest(inputs[:len(defaults)], defaults)), *inputs[len(defaults):],
                        **attrs)

    _CONVERTERS[domain, name or operator.name] = [Converter(convert)]


def converts_domain(domain: str) -> Callable[[Callable[[Call], Result]], Callable[[Call], Result]]:
    """Register a function as the converter of whatever operator of a domain."""
    return converts("*", domain=domain)


def find(domain: str, operator: str, version: int) -> Converter | None:
    """The converter of an operator in a version of its domain."""
    domain = "" if domain == "ai.onnx" else domain
    candidates = _CONVERTERS.get((domain, operator)) or _CONVERTERS.get((domain, "*"), [])
    for converter in candidates:
        if converter.since <= version < converter.until:
            return converter
    return None


def has_converter(operator: str, domain: str = "") -> bool:
    """Whether any version of an operator has a converter so far."""
    return (domain, operator) in _CONVERTERS


def converters() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Domain, operator and function of every converter."""
    for (domain, operator), known in _CONVERTERS.items():
        for converter in known:
            yield domain, operator, converter.function


def converted_operators() -> list[tuple[str, str]]:
    """Domain and name of everything that has a converter."""
    return sorted(_CONVERTERS)


@dataclass(frozen=True, eq=False)
class Call:
    """One node as its converter sees it."""

    node: Any  # onnx.NodeProto
    version: int  # of the node's domain in this model
    importer: Importer

    # ------------------------------------------------------------ inputs
    def __len__(self) -> int:
        return len(self.node.input)

    def has(self, i: int) -> bool:
        """Whether input number i is given."""
        return i < len(self.node.input) and bool(self.node.input[i])

    def value(self, i: int) -> Value:
        """An input that has to be there."""
        if not self.has(i):
            self.unsupported(f"misses its input number {i}")
        return self.importer.value(self.node.input[i])

    def optional(self, i: int) -> Value | None:
        """An input that may be left out."""
        return self.value(i) if self.has(i) else None

    def values(self) -> list[Value]:
        """All inputs that are given."""
        return [self.value(i) for i in range(len(self)) if self.has(i)]

    def known(self, i: int) -> np.ndarray | None:
        """What an input holds, if that is known now; sizes in it may be symbolic (dtype object)."""
        return self.importer.known(self.node.input[i]) if self.has(i) else None

    def array(self, i: int) -> np.ndarray:
        """What an input holds, all of it a plain number."""
        known = self.known(i)
        if known is None or known.dtype == object:
            raise NeedsValue(self.node.input[i])
        return known

    def sizes(self, i: int) -> list[Index]:
        """An input as a list of integers, of which some may be symbolic sizes."""
        known = self.known(i)
        if known is None:
            raise NeedsValue(self.node.input[i])
        return [n if isinstance(n, IndexExpr) else int(n) for n in known.reshape(-1)]

    def ints(self, i: int) -> list[int]:
        """An input as a list of plain integers."""
        return [int(n) for n in self.array(i).reshape(-1)]

    def number(self, i: int) -> Any:
        """An input with one element as a Python number."""
        array = self.array(i)
        if array.size != 1:
            self.unsupported(f"input number {i} should hold one number, has shape {array.shape}")
        item = array.reshape(-1)[0]
        return item.item() if array.dtype.kind in "biufc" else float(item)

    # ------------------------------------------------------------ attributes
    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute as Python data: numbers, strings, lists, arrays; graphs as protos."""
        for attribute in self.node.attribute:
            if attribute.name == name:
                return self.importer.attribute(attribute)
        return default

    def dtype(self, name: str, default: DType | None = None) -> DType:
        """An attribute that is a number of TensorProto.DataType."""
        code = self.attr(name)
        if code is None:
            assert default is not None
            return default
        return dtype_of(code)

    # ------------------------------------------------------------ outputs
    def wants(self, i: int) -> bool:
        """Whether anybody asked for output number i."""
        return i < len(self.node.output) and bool(self.node.output[i])

    def unsupported(self, why: str) -> NoReturn:
        """Give up on this node, and say why."""
        raise UnsupportedOperator(f"{node_text(self.node)} {why}")


def attribute_value(attribute: Any, where: str) -> Any:
    """An AttributeProto as Python data."""
    from onnx import AttributeProto as A

    kind = attribute.type
    if kind == A.FLOAT:
        return attribute.f
    if kind == A.INT:
        return attribute.i
    if kind == A.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == A.TENSOR:
        return tensor_array(attribute.t, None, where)
    if kind == A.SPARSE_TENSOR:
        return sparse_array(attribute.sparse_tensor, None, where)
    if kind == A.GRAPH:
        return attribute.g
    if kind == A.FLOATS:
        return list(attribute.floats)
    if kind == A.INTS:
        return list(attribute.ints)
    if kind == A.STRINGS:
        return [s.decode("utf-8", "replace") for s in attribute.strings]
    if kind == A.TYPE_PROTO:
        return attribute.tp
    raise UnsupportedOperator(f"attribute {attribute.name!r} is of a kind that is not read")
