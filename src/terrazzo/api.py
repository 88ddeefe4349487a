"""What happens when an operator or a compiled function is called with arrays.

The first call with new types traces, compiles and remembers; later calls find their entry by the
arguments' shapes, strides and types, and go straight to native code. When a size changes between
calls it becomes symbolic, so a function is compiled twice, not once for every size.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from terrazzo.chips.cpu import host
from terrazzo.compiler import Lowering, compile_graph, level_text
from terrazzo.dtypes import DType, as_dtype, result_type
from terrazzo.errors import ArgumentError, DeviceError, ShapeError, TerrazzoError
from terrazzo.graph import autodiff
from terrazzo.graph.ir import HOOKS, Graph, Operator, TensorType, Value, apply
from terrazzo.graph.trace import pack, trace
from terrazzo.index import Index, Var
from terrazzo.knobs import knobs
from terrazzo.ops.define import operator
from terrazzo.runtime import fastcall
from terrazzo.runtime.executable import Executable

_lock = threading.RLock()


class Compiled:
    """A function of tensors, compiled for whatever types it is called with."""

    def __init__(self, function: Callable[..., Any], name: str,
                 operator: Operator | None = None):
        self.function, self.name, self.operator = function, name, operator
        self.entries: dict[Hashable, Callable[..., Any]] = {}
        self.families: dict[Hashable, _Family] = {}
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            entry = self.entries.get(fastcall.key_of(args))
            if entry is not None:
                return entry(args)
        return self.slow(args, kwargs)

    # ------------------------------------------------------------ first call
    def slow(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Find out what the arguments are, compile if need be, run."""
        leaves, rebuild = self.arguments(args, kwargs)
        if any(isinstance(leaf, Value) for leaf in leaves):
            return rebuild.call(leaves)
        family = self.family(leaves, rebuild)
        entry = family.entry(leaves)
        key = None if kwargs else fastcall.key_of(args)
        if key is not None:
            with _lock:
                self.entries[key] = entry
        return entry(leaves)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]
                  ) -> tuple[list[Any], _Rebuild]:
        """Tensors among the arguments, and how to call the function with others in their place."""
        if self.operator is not None:
            tensors, attrs = self.operator.bind(args, kwargs)
            present = [t is not None for t in tensors]
            leaves = _as_arrays([t for t in tensors if t is not None])
            return leaves, _Rebuild(self.function, tuple(present), attrs)
        leaves = []
        structure = _flatten((tuple(args), kwargs), leaves)
        return _as_arrays(leaves), _Rebuild(self.function, structure, None)

    def family(self, leaves: Sequence[Any], rebuild: _Rebuild) -> _Family:
        key = (rebuild.key(), tuple((len(a.shape), str(a.dtype)) for a in leaves))
        with _lock:
            if key not in self.families:
                self.families[key] = _Family(self.name, rebuild)
            return self.families[key]

    # ------------------------------------------------------------ looking inside
    def graph(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Graph:
        """The traced graph for arguments like these."""
        leaves, rebuild = self.arguments(args, kwargs)
        return _trace(rebuild, self.name, [_type_of(a) for a in leaves])[0]

    def executable(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The executable for arguments like these."""
        leaves, rebuild = self.arguments(args, kwargs)
        return self.family(leaves, rebuild).static(leaves)[0]


class _Rebuild:
    """How to call a traced function with values in place of its tensor arguments."""

    def __init__(self, function: Callable[..., Any], structure: Any, attrs: Any):
        self.function, self.structure, self.attrs = function, structure, attrs

    def key(self) -> Hashable:
        return (_frozen(self.structure), _frozen(self.attrs))

    def call(self, values: Sequence[Any]) -> Any:
        if self.attrs is None:
            args, kwargs = _unflatten(self.structure, iter(values))
            return self.function(*args, **kwargs)
        given = iter(values)
        tensors = [next(given) if here else None for here in self.structure]
        return self.function(*tensors, **self.attrs)


class _Family:
    """All entries of one function for one combination of ranks, types and attributes."""

    def __init__(self, name: str, rebuild: _Rebuild):
        self.name, self.rebuild = name, rebuild
        self.executables: dict[Hashable, tuple[Any, Any]] = {}
        self.seen: list[tuple[tuple[int, ...], ...]] = []
        self.varying: set[tuple[int, int]] = set()

    def entry(self, leaves: Sequence[Any]) -> Callable[..., Any]:
        with _lock:
            fastcall.check_devices(leaves, self.name)
            executable, structure = self.find(leaves)
        plain = fastcall.entry(executable, structure, leaves)
        if any(getattr(a, "requires_grad", False) for a in leaves):
            from terrazzo.torch_autograd import differentiable

            return differentiable(self.name, self.rebuild.call, plain, len(leaves))
        return plain

    def find(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        shapes = tuple(tuple(a.shape) for a in leaves)
        if knobs.dynamic != "never" and shapes not in self.executables:
            self.note(shapes)
            if self.varying:
                found = self.dynamic(leaves, shapes)
                if found is not None:
                    return found
        return self.static(leaves)

    def note(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Which sizes differ from call to call. Sizes 0 and 1 mean something of their own."""
        if knobs.dynamic == "always":
            self.varying = {(i, d) for i, s in enumerate(shapes) for d in range(len(s))}
        for old in self.seen[:1]:
            for i, (a, b) in enumerate(zip(old, shapes, strict=True)):
                self.varying |= {(i, d) for d in range(len(a)) if a[d] != b[d]}
        self.seen.append(shapes)

    def static(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Compiled for exactly these sizes."""
        key = tuple(tuple(a.shape) for a in leaves)
        if key not in self.executables:
            graph, structure = _trace(self.rebuild, self.name, [_type_of(a) for a in leaves])
            self.executables[key] = (compile_graph(graph), structure)
        return self.executables[key]

    def dynamic(self, leaves: Sequence[Any], shapes: tuple[tuple[int, ...], ...]
                ) -> tuple[Any, Any] | None:
        """Compiled once for all sizes that vary; None where that is not possible."""
        pattern: list[tuple[Index, ...]] = []
        names: dict[Hashable, Var] = {}
        for i, shape in enumerate(shapes):
            dims: list[Index] = []
            for d, n in enumerate(shape):
                if (i, d) not in self.varying or n < 2:
                    dims.append(n)
                    continue
                # Sizes that were equal in every call so far are one size.
                history = (n, *(old[i][d] for old in self.seen))
                dims.append(names.setdefault(history, Var(f"n{len(names)}", 0)))
            pattern.append(tuple(dims))
        key = ("dynamic", tuple(pattern))
        if key not in self.executables:
            types = [TensorType(p, _dtype(a)) for p, a in zip(pattern, leaves, strict=True)]
            try:
                graph, structure = _trace(self.rebuild, self.name, types)
                self.executables[key] = (compile_graph(graph), structure)
            except TerrazzoError:
                self.executables[key] = (None, None)  # not for symbolic sizes: one each
        found = self.executables[key]
        return None if found[0] is None else found


def _trace(rebuild: _Rebuild, name: str, types: Sequence[TensorType]) -> tuple[Graph, Any]:
    return trace(lambda *values: rebuild.call(values), types, name=name)


# ---------------------------------------------------------------- arguments
def _dtype(x: Any) -> DType:
    return as_dtype(x.dtype)


def _type_of(x: Any) -> TensorType:
    return TensorType(tuple(int(n) for n in x.shape), _dtype(x))


def _as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Arrays stay; Python numbers become 0-d arrays of the type they take among the others."""
    types = [_dtype(a) for a in leaves if fastcall.is_array(a) or isinstance(a, Value)]
    result = []
    for leaf in leaves:
        if fastcall.is_array(leaf) or isinstance(leaf, Value):
            result.append(leaf)
        elif isinstance(leaf, (bool, int, float, complex)):
            result.append(np.asarray(leaf, result_type(leaf, *types).np))
        else:
            try:
                array = np.asarray(leaf)
            except ValueError as error:  # lists of unequal lengths
                raise ArgumentError(f"cannot make a tensor of a {type(leaf).__name__}: {error}",
                                    hint="all rows must have the same length") from None
            if array.dtype == object:
                raise ArgumentError(f"cannot make a tensor of {type(leaf).__name__}",
                                    hint="pass numpy arrays, torch tensors or numbers")
            if array.dtype == np.float64 and not isinstance(leaf, np.generic):
                array = array.astype(np.float32)  # lists of Python floats
            result.append(array)
    return result


def _flatten(tree: Any, leaves: list[Any]) -> Any:
    if isinstance(tree, tuple):
        return ("tuple", tuple(_flatten(t, leaves) for t in tree))
    if isinstance(tree, list):
        return ("list", tuple(_flatten(t, leaves) for t in tree))
    if isinstance(tree, dict):
        return ("dict", tuple((k, _flatten(v, leaves)) for k, v in tree.items()))
    if fastcall.is_array(tree) or isinstance(tree, (Value, float, complex)):
        leaves.append(tree)
        return ("leaf", None)
    return ("static", tree)


def _unflatten(structure: Any, leaves: Any) -> Any:
    kind, content = structure
    if kind == "leaf":
        return next(leaves)
    if kind == "static":
        return content
    if kind == "dict":
        return {k: _unflatten(v, leaves) for k, v in content}
    items = [_unflatten(c, leaves) for c in content]
    return tuple(items) if kind == "tuple" else items


def _frozen(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    try:
        hash(value)
    except TypeError:
        return (type(value).__name__, id(value))
    return (type(value).__name__, value)


# ---------------------------------------------------------------- the public functions
_compiled: dict[Operator, Compiled] = {}


def compiled(op: Operator) -> Compiled:
    """The compiled form of an operator, made when first called."""
    found = _compiled.get(op)
    if found is None:
        with _lock:
            found = _compiled.setdefault(op, Compiled(
                lambda *tensors, **attrs: apply(op, tensors, attrs), op.name, op))
    return found


def _call(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compiled(op)(*args, **kwargs)


def _lower(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`op.lower(x, "loop")`: the last positional string is the level."""
    target = kwargs.pop("target", "cpu")
    if not args or not isinstance(args[-1], str):
        raise ArgumentError(f"{op.name}.lower needs a level as its last argument",
                            hint=f'for example {op.name}.lower(x, "loop")')
    *tensors, level = args
    return lower(compiled(op).graph(tensors, kwargs), level, target)


def lower(graph: Graph, level: str, target: str = "cpu") -> str:
    """One level of a graph's compilation as text."""
    lowering = Lowering(graph, host())
    if level == "triton" or target == "cuda":
        from terrazzo.codegen.triton.source import triton_source

        return "\n\n".join(triton_source(g.program) for g in lowering.fused.groups)
    if target != "cpu":
        raise DeviceError(f"there is no target {target!r}", hint="targets are cpu and cuda")
    return level_text(lowering, level)


def _compile(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compiled(op).executable(args, kwargs)


def _verify(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return verify(op, *args, **kwargs)


def _bench(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bench(op, *args, **kwargs)


HOOKS.update(call=_call, lower=_lower, compile=_compile, verify=_verify, bench=_bench)


def verify(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Check every level of a function against the one above; see terrazzo.verifier."""
    from terrazzo import verifier

    return verifier.verify(function, *args, **kwargs)


def bench(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Time a function beside numpy and torch; see terrazzo.benchmark."""
    from terrazzo import benchmark

    return benchmark.bench(function, *args, **kwargs)


def op(function: Callable[..., Any] | None = None, *, name: str | None = None,
       grad: Callable[..., Any] | None = None) -> Any:
    """Make a function of tensors an operator: compiled, differentiable, like the built-in ones.

    Parameters before `*` are tensors, those after it are attributes.
    """
    return operator(function, family="user", name=name, grad=grad)


def jit(function: Callable[..., Any]) -> Compiled:
    """Compile a function of tensors (or of nests of tensors) without making it an operator."""
    return Compiled(function, getattr(function, "__name__", "function").strip("<>") or "function")


def load(path: Any) -> Executable:
    """An executable from the file that `Executable.save` wrote."""
    return Executable.load(path)


autodiff.install_compiler(jit)
__all__ = ["Compiled", "ShapeError", "bench", "compiled", "jit", "load", "lower", "op", "pack",
           "verify"]
