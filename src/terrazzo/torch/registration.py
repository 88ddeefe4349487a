"""`tz.torch.register`: an operator of ours as an operator of torch's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from terrazzo.base.nests import leaves
from terrazzo.base.shapes import likely_shapes
from terrazzo.calls.captures import Surroundings
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, TerrazzoError
from terrazzo.frontends.onnx.registry import converts_operator
from terrazzo.graph.ir import Operator, TensorType
from terrazzo.graph.trace import trace
from terrazzo.torch.overload import Overload, check_autocast
from terrazzo.torch.schema import REQUIRED, Schema, schemas

_REGISTERED: dict[str, TorchOperator] = {}
_OF_TORCH = ("aten", "prim", "prims", "torch", "torchvision", "c10d", "higher_order")


class TorchOperator(torch.library.CustomOpDef):
    """An operator of ours in torch: called, `torch.ops.namespace.name` is.

    It is a CustomOpDef for functions of torch.library that take one, such as `opcheck`.
    """

    def __init__(self, operator: Operator, name: str, overloads: list[Overload]):
        self.operator, self.name, self.overloads = operator, name, overloads
        namespace, _, own = name.partition("::")
        self.packet = getattr(getattr(torch.ops, namespace), own)
        self.__name__, self.__doc__ = own, operator.doc or None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.packet(*args, **kwargs)

    @property
    def _opoverload(self) -> Any:
        return self.overloads[0].torch

    @property
    def default(self) -> Any:
        """The overload that takes tensors for tensors."""
        return self.overloads[0].torch

    def register_kernel(self, device_types: Any, func: Any = None, /) -> Any:
        """A kernel of the caller's own for devices that ours is not for."""
        return torch.library.register_kernel(self.default, device_types, func)

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError(f"{self.name} has all its rules from the operator "
                            f"{self.operator.name}", hint="a gradient of its own is "
                            "@tz.op(grad=...)")

    register_fake = register_autograd = register_vmap = register_autocast = _refused
    register_torch_dispatch = _refused

    def __repr__(self) -> str:
        return "\n".join(f"<torch operator {self.name.partition('::')[0]}::{o.schema}>"
                         for o in self.overloads)


def register(operator: Operator, name: str, *, types: Mapping[str, str] | None = None,
             results: int | None = None, autocast: Any = None) -> TorchOperator:
    """Make an operator one of torch's: `torch.ops.mylib.squared_relu` for "mylib::squared_relu".

    It has a schema, a kernel for the CPU and one for fake tensors, gradients of every order,
    forward mode and vmap; torch.compile, torch.export and torch.onnx.export see it as it is, and
    ONNX models of the domain `mylib` that use it run in our session.

    types     torch's type of parameters after `*` that no annotation and no default tells, such
              as {"axis": "SymInt?"}
    results   how many tensors it answers with, where that cannot be found by trying
    autocast  inside torch.autocast: None, the types that come; "lower", the type that autocast
              has; "float32"; "widest", float32 if any of them is; or a torch.dtype
    """
    if not isinstance(operator, Operator):
        raise ArgumentError(f"register takes an operator, not a {type(operator).__name__}",
                            hint="make the function one with @tz.op")
    _check_name(name, operator)
    check_autocast(autocast)
    _check_captures(operator)
    returns = _returns(operator, results)
    listed = schemas(operator, name, types or {}, returns)
    made = TorchOperator(operator, name, [_overload(operator, schema, autocast)
                                          for schema in listed])
    converts_operator(operator, *name.split("::"))
    _REGISTERED[name] = made
    return made


def registered() -> list[TorchOperator]:
    """All operators of ours that torch has."""
    return list(_REGISTERED.values())


def _check_name(name: Any, operator: Operator) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*::[A-Za-z]\w*", name):
        raise ArgumentError(f"{name!r} is no name of a torch operator",
                            hint=f'it is "namespace::name", such as "mylib::{operator.name}"')
    namespace = name.partition("::")[0]
    if namespace in _OF_TORCH:
        raise ArgumentError(f"{name} would be in the namespace {namespace!r}, which is torch's own",
                            hint="choose one of your own")
    known = _REGISTERED.get(name)
    if known is not None:
        raise ArgumentError(f"{name} is registered already, for {known.operator!r}",
                            hint="choose another name: torch keeps an operator for as long as the "
                            "process lives")
    for taken in (name, f"{name}_vjp"):
        if torch._C._jit_get_schemas_for_operator(taken):
            raise ArgumentError(f"torch has an operator {taken} already",
                                hint="choose another name")


def _check_captures(operator: Operator) -> None:
    """What an operator mentions besides its arguments gets no gradient: torch sees arguments."""
    if operator.body is None:
        return
    around = Surroundings(operator.body)
    held = [*around.cells, *around.globals, *around.objects]
    for value in (content if isinstance(content, (torch.Tensor, torch.nn.Module)) else owner
                  for owner, content in held):
        tensors = [value] if isinstance(value, torch.Tensor) else (
            value.parameters() if isinstance(value, torch.nn.Module) else ())
        if any(t.requires_grad for t in tensors):
            raise ArgumentError(f"{operator.name} mentions a tensor that requires a gradient, and "
                                "a torch operator has gradients by its arguments alone",
                                hint="make it an argument")


# ---------------------------------------------------------------- results
def _returns(operator: Operator, results: int | None) -> str:
    """Torch's type of the results: a tensor, or a tuple of so many."""
    if results is not None:
        return "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    for count, structure in _tried(operator):
        return "Tensor" if structure == 0 else f"({', '.join(['Tensor'] * count)})"
    raise ArgumentError(f"how many tensors {operator.name}{operator.signature} answers with "
                        "cannot be found by trying", hint="pass results=1, or as many as it has")


def _tried(operator: Operator) -> Iterator[tuple[int, Any]]:
    """The number of results and their nest for each of some likely shapes."""
    needed = [p for p in operator.tensor_params if p.default is REQUIRED]
    count = len(needed) + (1 if operator.variadic else 0)
    attrs: dict[str, Any] = {p.name: 1 for p in operator.attr_params
                             if p.default is REQUIRED}
    for shapes in likely_shapes(count):
        types = [TensorType(shape, float32) for shape in shapes]
        try:
            graph, structure = trace(operator, types, **attrs)
        except (TerrazzoError, TypeError, ValueError, AttributeError, LookupError):
            continue
        yield len(graph.outputs), structure


# ---------------------------------------------------------------- one overload
def _overload(operator: Operator, schema: Schema, autocast: Any) -> Overload:
    tensors = len(operator.tensor_params)
    names = [p.name for p in schema.parameters[tensors:]]
    defaults = [p.stands_for for p in schema.parameters[:tensors]]

    def meaning(arguments: list[Any]) -> Any:
        given = [default if a is None and default is not REQUIRED else a
                 for a, default in zip(arguments, defaults, strict=False)]
        attrs = {name: tuple(a) if isinstance(a, list) else a
                 for name, a in zip(names, arguments[tensors:], strict=True)}
        return operator(*given, **attrs)

    return Overload(schema, meaning, autocast, _quick(operator, schema, defaults))


def _quick(operator: Operator, schema: Schema, defaults: list[Any]) -> Callable[..., Any]:
    """The compiled operator for arguments as torch hands them over, with little in between."""
    run: Callable[..., Any] = operator.compiled
    if schema.returns != "Tensor":
        whole = run

        def run(*args: Any, **kwargs: Any) -> Any:
            return tuple(leaves(whole(*args, **kwargs)))

    if all(default is REQUIRED for default in defaults):
        return run
    inner = run

    def with_defaults(*args: Any, **kwargs: Any) -> Any:
        for a in args:
            if a is None:
                args = tuple(default if a is None and default is not REQUIRED else a
                             for a, default in zip(args, defaults))
                break
        return inner(*args, **kwargs)

    return with_defaults


__all__ = ["TorchOperator", "register", "registered"]
