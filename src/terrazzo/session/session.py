"""A session: one model, loaded and compiled, ready to be run from any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from terrazzo.compiler import compile_graph, load_compiled, model_key
from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ModelError, TerrazzoError
from terrazzo.frontends.onnx import convert
from terrazzo.frontends.onnx.importer import Imported, import_nodes
from terrazzo.frontends.onnx.model import Model, load_model
from terrazzo.frontends.onnx.types import STRING, dtype_of
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.index import Index, IndexExpr, Var, evaluate
from terrazzo.knobs import knobs
from terrazzo.runtime.artifact import index_data, index_from
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.profile import Profile
from terrazzo.session.block import Block, Setting, log

assert convert  # importing it registers the converters


@dataclass(frozen=True)
class Port:
    """An input or output of a model."""

    name: str
    dtype: DType | None  # None for strings and for what is no tensor
    shape: tuple[Any, ...] | None  # of sizes: int, a name, or None; None: any rank
    kind: str = "tensor"  # tensor | string | sequence | optional | map


def port_of(info: Any) -> Port:
    """What a ValueInfoProto says."""
    kind = info.type.WhichOneof("value") or "tensor_type"
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return Port(info.name, None, None, kind.removesuffix("_type"))
    tensor = getattr(info.type, kind)
    shape = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None)
                  for d in tensor.shape.dim) if tensor.HasField("shape") else None
    if tensor.elem_type == STRING:
        return Port(info.name, None, shape, "string")
    try:
        return Port(info.name, dtype_of(tensor.elem_type), shape)
    except TerrazzoError:
        return Port(info.name, None, shape)


class Session:
    """A model that runs: `run(feeds)` answers its outputs in order."""

    def __init__(self, source: Any, *, reference: bool = True, compile_now: bool = True,
                 threads: int = 0, level: str = "", sizes: Mapping[str, int] | None = None,
                 profile: bool = False):
        """Load a model and, unless told otherwise, compile it at once where its types allow.

        `reference` says whether onnx's reference may run what nothing else can; `threads` and
        `level` (of rewrites) are the knobs' where not given; `sizes` fixes symbolic dimensions.
        """
        self.model: Model = load_model(source)
        self.threads, self.level = threads, level or knobs.opt_level
        self.sizes = dict(sizes or {})
        self.profiles: list[Profile] | None = [] if profile else None
        graph = self.model.graph
        self.inputs = tuple(map(port_of, self.model.input_infos))
        self.overridable = tuple(map(port_of, self.model.overridable_infos))
        self.outputs = tuple(map(port_of, graph.output))
        for port in self.inputs:
            if port.shape is not None and any(isinstance(n, int) and n < 0 for n in port.shape):
                raise ModelError(f"input {port.name!r} has the impossible shape {port.shape}",
                                 where=self.model.where)
        self.setting = Setting(self.model.opsets, self._compile, reference, self.model.where,
                               self._call)
        self.block = Block(list(graph.node), self.model.weights, [o.name for o in graph.output],
                           self.setting, graph.name or "model")
        self.whole: Executable | None = self._compile_whole() if compile_now else None

    def _compile(self, graph: Graph) -> Any:
        with knobs.override(opt_level=self.level):
            return compile_graph(graph)

    def _call(self, executable: Any, arrays: Sequence[Any], into: Sequence[Any] = ()) -> list[Any]:
        """Run a compiled part with this session's threads, recording it where that is wanted."""
        if isinstance(executable, Executable):
            return executable.run(arrays, threads=self.threads, into=into, profiles=self.profiles)
        return executable.run(arrays)

    # ------------------------------------------------------------ before the first run
    @cached_property
    def imported(self) -> Imported | None:
        """The whole model as one graph by its declared types; None where those say too little."""
        types = self._declared_types()
        if types is None:
            return None
        return import_nodes(list(enumerate(self.model.graph.node)), self.model.opsets, types,
                            self.model.weights, [o.name for o in self.outputs],
                            self.model.graph.name or "model", self.model.where)

    def _declared_types(self) -> dict[str, TensorType] | None:
        types = {}
        sizes: dict[str, Var] = {}

        def size(n: Any) -> Index:
            if isinstance(n, int):
                return n
            if n in self.sizes:
                return self.sizes[n]
            name = n or f"size{len(sizes)}"
            return sizes.setdefault(name, Var(_identifier(name)))

        for port in self.inputs:
            if port.dtype is None or port.shape is None:
                return None
            types[port.name] = TensorType(tuple(map(size, port.shape)), port.dtype)
        return types

    def _compile_whole(self) -> Executable | None:
        """The model as one executable, from the cache if it was compiled before."""
        with knobs.override(opt_level=self.level):
            key = model_key(self.model.digest, str(sorted(self.sizes.items())))
            known = load_compiled(key)
            if known is not None:
                return known
            imported = self.imported
            if imported is None or imported.put_off or set(imported.outputs) != {
                    o.name for o in self.outputs}:
                return None
            try:
                made = compile_graph(imported.graph, key=key, notes={
                    "outputs": list(imported.outputs), "assumptions": [
                        [index_data(a), index_data(b)] for a, b in imported.assumptions]})
            except TerrazzoError as error:
                if not any(isinstance(n, IndexExpr) for v in imported.graph.inputs
                           for n in v.shape):
                    raise
                log.warning("the model is compiled for each size it meets: %s", error.message)
                return None
        return made if isinstance(made, Executable) else None

    # ------------------------------------------------------------ running
    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None, *,
            into: Mapping[str, np.ndarray] | None = None) -> list[Any]:
        """The model's outputs, all or those named, for inputs by name.

        `into` holds memory to write outputs to, by name.
        """
        names = [o.name for o in self.outputs] if not outputs else list(outputs)
        values = self._checked(feeds)
        whole = self.whole
        if whole is not None and self._fits(whole, values):
            made = whole.artifact.notes["outputs"]
            results = dict(zip(made, self._call(
                whole, [values[n] for n, _, _ in whole.input_types],
                [into.get(n) for n in made] if into else ()), strict=True))
            return [results[n] for n in self._known_outputs(names)]
        found = self.block.run(values, self._known_outputs(names))
        for i, name in enumerate(names):
            if into and name in into:
                into[name][...] = found[i]
                found[i] = into[name]
        return found

    def _fits(self, whole: Executable, values: Mapping[str, Any]) -> bool:
        """Whether the executable of the whole model may run on these inputs."""
        if any(p.name in values for p in self.overridable):
            return False
        assumed = whole.artifact.notes["assumptions"]
        if not assumed:
            return True
        sizes = {n.name: size for name, _, shape in whole.input_types
                 for n, size in zip(shape, values[name].shape, strict=True) if isinstance(n, Var)}
        return all(evaluate(index_from(a), sizes) <= evaluate(index_from(b), sizes)
                   for a, b in assumed)

    def _known_outputs(self, names: Sequence[str]) -> Sequence[str]:
        known = {o.name for o in self.outputs}
        for name in names:
            if name not in known:
                raise ModelError(f"the model has no output {name!r}",
                                 hint=f"it has {', '.join(sorted(known))}")
        return names

    def _checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        ports = {p.name: p for p in (*self.inputs, *self.overridable)}
        for name in feeds:
            if name not in ports:
                raise ModelError(f"the model has no input {name!r}",
                                 hint=f"it takes {', '.join(ports) or 'none'}")
        missing = [p.name for p in self.inputs if p.name not in feeds and p.kind != "optional"]
        if missing:
            raise ModelError(f"the model needs its input {missing[0]!r}",
                             hint=f"given were {', '.join(feeds) or 'none'}")
        sizes: dict[str, int] = {}
        return {n: _fitting(ports[n], value, sizes) for n, value in feeds.items()}


def _fitting(port: Port, value: Any, sizes: dict[str, int]) -> Any:
    """An input checked against what the model says of it."""
    if port.kind != "tensor":
        return value
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        value = np.asarray(value, None if port.dtype is None else port.dtype.np)
    elif isinstance(value, np.generic):
        value = np.asarray(value)
    if port.dtype is not None and value.dtype is not port.dtype.np:
        given = as_dtype(value.dtype)
        if given is not port.dtype:
            raise ModelError(f"input {port.name!r} is {given.name}, the model takes "
                             f"{port.dtype.name}")
    if port.shape is None:
        return value
    if len(port.shape) != len(value.shape):
        raise ModelError(f"input {port.name!r} has {len(value.shape)} dimensions "
                         f"{tuple(value.shape)}, the model takes {len(port.shape)}: {port.shape}")
    for wanted, size in zip(port.shape, value.shape, strict=True):
        if isinstance(wanted, str):
            wanted = sizes.setdefault(wanted, size)
        if isinstance(wanted, int) and wanted != size:
            raise ModelError(f"input {port.name!r} has shape {tuple(value.shape)}, the model takes "
                             f"{port.shape}" + (f" with {sizes}" if sizes else ""))
    return value


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return text if text[:1].isalpha() else f"n_{text}"
