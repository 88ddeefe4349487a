"""Operators as Python objects: methods of classes, and what a pickle says of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrazzo.graph.ir import Operator


# ---------------------------------------------------------------- methods
def is_method(function: Any) -> bool:
    """Whether a function was written in the body of a class, to be called on its objects."""
    within = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(within) and not within.endswith("<locals>") and not isinstance(
        function, staticmethod) and not inspect.ismethod(function)


def of_object(op: Operator) -> tuple[str, Operator]:
    """The operator with its first parameter, the object, as an attribute; and its name.

    An object is a part of the program, like all that is no tensor. What it holds is looked at in
    each call: arrays are read, and anything else that changed makes another program.
    """
    body = op.body
    assert body is not None
    first, *rest = op.signature.parameters.values()
    positional = [p for p in rest if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    moved = first.replace(kind=first.KEYWORD_ONLY, default=first.empty)

    @wraps(body)
    def on_object(*tensors: Any, **attrs: Any) -> Any:
        return body(attrs.pop(first.name), *tensors, **attrs)

    signature = inspect.Signature([*positional, moved, *rest[len(positional):]])
    return first.name, replace(op, signature=signature, body=on_object)


@dataclass(frozen=True, eq=False, repr=False)
class BoundOperator:
    """An operator that a class defines, taken from one of its objects."""

    defined: Operator
    owner: Any

    def __post_init__(self) -> None:
        shown = list(inspect.signature(self.defined).parameters.values())[1:]
        self.__dict__.update(__signature__=inspect.Signature(shown), __name__=self.defined.name,
                             __doc__=self.defined.doc)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        name, op = self.defined.as_method
        return op(*args, **kwargs, **{name: self.owner})

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        name, op = self.defined.as_method
        found = getattr(op, attribute)
        return partial(found, **{name: self.owner}) if attribute in (
            "lower", "verify", "bench", "compile") else found

    def __reduce__(self) -> Any:
        assert self.defined.body is not None
        return getattr, (self.owner, name_of(inspect.unwrap(self.defined.body)))

    def __repr__(self) -> str:
        return f"<bound {self.defined!r} of {self.owner!r}>"


# ---------------------------------------------------------------- functions and their names
def name_of(function: Any) -> str:
    """What to call a function, a partial one or an object that can be called."""
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", None) or type(function).__name__)


def doc_of(function: Any) -> str:
    """What a function says of itself; an object that can be called speaks for its class."""
    if isinstance(function, partial):
        return doc_of(function.func)
    return inspect.getdoc(function) or ""


# ---------------------------------------------------------------- pickles
def found_at(module: str, name: str) -> Any:
    """What stands under a dotted name in a module."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def reference(made: Any, function: Any, remake: Callable[..., Any], *rest: Any) -> Any:
    """How a pickle names what was made of a function: as functions are, by where it stands.

    If the function itself stands there, it is made of it anew.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module and name and "<locals>" not in name:
        try:
            if found_at(module, name) is made:
                return found_at, (module, name)
        except (ImportError, AttributeError):
            pass
    return remake, (function, *rest)
