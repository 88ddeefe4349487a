"""Torch's symbolic sizes as ours and back, for the types of results before there are any values.

A SymInt becomes a variable of ours. What tracing asks about it is put to torch, which keeps the
answer as a guard of its own; sizes of results are computed with SymInts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from terrazzo.dtypes import as_dtype, result_type
from terrazzo.errors import TerrazzoError
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.scopes import trace_scope
from terrazzo.graph.sizes import seen
from terrazzo.index import Index, Var
from terrazzo.index.guards import RELATIONS, CallQuestions, asking
from terrazzo.index.nodes import IndexExpr
from terrazzo.index.queries import compile_python, free_vars


class TorchSizes:
    """The variables that stand for torch's symbolic sizes in one call."""

    def __init__(self, fixed: bool = False) -> None:
        self.fixed = fixed
        self.names: dict[Any, Var] = {}  # by torch's own expression
        self.symbols: dict[Var, Any] = {}

    def index(self, size: Any) -> Index:
        """A size as ours: a number, or the variable of a symbol."""
        if isinstance(size, int) or self.fixed:
            return int(size)
        node = size.node
        known = node.maybe_as_int()
        if known is None and not _is_unbacked(size) and node.hint < 2:
            known = int(size)  # 0 and 1 mean something of their own
        if known is not None:
            return int(known)
        if node.expr not in self.names:
            var = Var(f"n{len(self.names)}", 2)
            self.names[node.expr], self.symbols[var] = var, size
        return self.names[node.expr]

    def type_of(self, tensor: Any) -> TensorType:
        return TensorType(tuple(map(self.index, tensor.shape)), as_dtype(tensor.dtype))

    def torch_size(self, size: Index) -> Any:
        """A size of ours in torch's terms."""
        if not isinstance(size, IndexExpr):
            return size
        variables = sorted(free_vars(size), key=lambda v: v.name)
        names = {v: f"v{i}" for i, v in enumerate(variables)}
        source = f"lambda {', '.join(names.values())}: {compile_python(size, names)}"
        return eval(source, {"min": _least, "max": _most})(*(self.symbols[v] for v in variables))


def _least(*sizes: Any) -> Any:
    import torch

    return reduce(torch.sym_min, sizes)


def _most(*sizes: Any) -> Any:
    import torch

    return reduce(torch.sym_max, sizes)


def _is_unbacked(size: Any) -> bool:
    """Whether torch knows no number for a size: it depends on data."""
    return not size.node.has_hint()


class TorchQuestions(CallQuestions):
    """Questions about sizes that torch answers, and remembers itself."""

    def __init__(self, sizes: TorchSizes):
        super().__init__(sizes.symbols)
        self.torch_size = sizes.torch_size

    def _relation(self, relation: str, left: Index, right: Index) -> Any:
        return RELATIONS[relation](self.torch_size(left), self.torch_size(right))

    def answer(self, relation: str, left: Index, right: Index) -> bool:
        """What torch says; of sizes that depend on data: they are in general unequal."""
        from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

        truth = self._relation(relation, left, right)
        return bool(guard_or_false(truth) if relation == "==" else guard_or_true(truth))

    def grant(self, relation: str, left: Index, right: Index) -> bool:
        """What has to hold: torch checks it when it runs, where it cannot tell now."""
        import torch

        truth = self._relation(relation, left, right)
        if isinstance(truth, bool):
            return truth
        if truth.node.has_hint():
            return bool(truth)
        torch._check(truth)
        return True

    def shortcut(self, relation: str, left: Index, right: Index) -> bool:
        return self.answer(relation, left, right)

    def value(self, size: Index) -> int:
        return int(self.torch_size(size))


Meaning = Callable[[Sequence[Value], Sequence[Value], Callable[[Any], Any]], Sequence[Value]]


def result_types(function: Meaning, tensors: Sequence[Any], numbers: Sequence[float]
                 ) -> list[tuple[Any, Any]]:
    """Sizes (torch's) and element types of what a traced function gives for tensors and numbers.

    It is handed besides what makes a size of ours out of one of torch's.
    """
    for attempt in ("symbolic", "sizes", "fixed"):
        try:
            return _result_types(function, tensors, numbers, attempt)
        except (TerrazzoError, TypeError, ValueError, LookupError):
            # A number that shapes the program, such as an axis, has to be known, and so has a size
            # that an operator compares without asking. What is wrong for numbers is an error.
            if attempt == "fixed":
                raise
    raise AssertionError


def _result_types(function: Meaning, tensors: Sequence[Any], numbers: Sequence[float],
                  attempt: str) -> list[tuple[Any, Any]]:
    """The same, with sizes of tensors and numbers among the arguments symbolic, or fixed."""
    sizes = TorchSizes(fixed=attempt == "fixed")
    types = [sizes.type_of(t) for t in tensors]
    dtypes = [t.dtype for t in types]
    values = [Value(t, name=f"x{i}") for i, t in enumerate(types)]
    weak = [Value(TensorType((), result_type(1.0, *dtypes).compute), is_number=True)
            for _ in numbers]
    asked = TorchQuestions(sizes)
    with asking(asked), trace_scope():
        found = function(values, weak,
                         lambda n: seen(sizes.index(n)) if attempt == "symbolic" else int(n))
        return [(tuple(map(sizes.torch_size, v.type.shape)), v.type.dtype) for v in found]


__all__ = ["TorchQuestions", "TorchSizes", "result_types"]
