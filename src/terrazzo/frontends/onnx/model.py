"""Reading ONNX models: files, bytes or protos into a `Model`, checked as far as structure goes."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from terrazzo.errors import MissingDependency, ModelError
from terrazzo.frontends.onnx.string_tables import numbered_strings
from terrazzo.frontends.onnx.strings import without_strings
from terrazzo.frontends.onnx.types import STRING, dtype_of
from terrazzo.frontends.onnx.wire import Cut, DamagedMessage, cut_weights

OLDEST = 7  # opset of ai.onnx; what came before had other semantics (broadcasting)
_MOST_ELEMENTS = 1 << 40
_CHUNK = 1 << 24


def onnx_module() -> Any:
    """The onnx package, or an error that says how to get it."""
    try:
        import onnx
    except ImportError:
        raise MissingDependency("reading ONNX models needs the package onnx",
                                hint='pip install "terrazzo[onnx]"') from None
    return onnx


@dataclass(frozen=True, eq=False)
class Model:
    """An ONNX model: its structure as a proto without large weights, and those by name."""

    proto: Any  # onnx.ModelProto, local functions inlined
    where: str  # the file, or "<bytes>"
    opsets: Mapping[str, int]
    weights: Mapping[str, np.ndarray] = field(repr=False)
    sources: tuple[Any, ...] = field(repr=False)  # the bytes that all this was read from

    @cached_property
    def digest(self) -> str:
        """A name for everything that decides results: structure and weights."""
        # A tree of hashes: its leaves are computed side by side.
        with ThreadPoolExecutor() as pool:
            leaves = [pool.submit(_leaf, data, start) for data in self.sources
                      for start in range(0, len(data), _CHUNK)]
            return hashlib.sha256(b"".join(leaf.result() for leaf in leaves)).hexdigest()

    def release(self) -> None:
        """Give back the pages of the file that were read: once compiled, weights are elsewhere."""
        for data in self.sources:
            if isinstance(data, mmap.mmap):
                data.madvise(mmap.MADV_DONTNEED)

    @property
    def graph(self) -> Any:
        return self.proto.graph

    @cached_property
    def input_infos(self) -> tuple[Any, ...]:
        """The ValueInfoProtos of inputs a caller has to give: those without an initialiser."""
        return tuple(i for i in self.graph.input if i.name not in self.weights)

    @cached_property
    def overridable_infos(self) -> tuple[Any, ...]:
        """Inputs with a default value."""
        return tuple(i for i in self.graph.input if i.name in self.weights)


def _leaf(data: Any, start: int) -> bytes:
    digest = hashlib.sha256(memoryview(data)[start:start + _CHUNK]).digest()
    if isinstance(data, mmap.mmap):  # given back at once: a model must not be in memory twice
        data.madvise(mmap.MADV_DONTNEED, start, min(_CHUNK, len(data) - start))
    return digest


# ---------------------------------------------------------------- reading
def load_model(source: Any, folder: str | os.PathLike[str] | None = None) -> Model:
    """A model from a path, bytes, or an onnx.ModelProto; ModelError says what is wrong with it.

    Data in other files is looked for in `folder`; by default beside the model's own file.
    """
    onnx = onnx_module()
    given = None if folder is None else Path(folder)
    if isinstance(source, onnx.ModelProto):
        return _model(onnx, source.SerializeToString(), "<proto>", given)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _model(onnx, bytes(source), "<bytes>", given)
    path = Path(os.fspath(source))
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model: {error}", where=str(path)) from None
    return _model(onnx, data, str(path), given or path.parent)


def _model(onnx: Any, source: Any, where: str, folder: Path | None) -> Model:
    data = memoryview(source)
    try:
        cut = cut_weights(data)
        proto = onnx.ModelProto.FromString(cut.structure)
    except DamagedMessage as error:
        raise ModelError(f"this is not an ONNX model, or it is damaged: {error}",
                         where=where) from None
    except Exception as error:  # protobuf's own DecodeError, whatever implementation it has
        raise ModelError(f"this is not an ONNX model, or it is damaged: {error}",
                         where=where) from None
    if not proto.HasField("graph"):
        raise ModelError("the file holds no ONNX graph", where=where,
                         hint="is it an .onnx file, and complete?")
    opsets = _opsets(proto, where)
    if proto.functions:
        proto = _inlined(onnx, proto, where)
    without_strings(proto.graph)
    weights = dict(_weights(onnx, proto, cut, data, folder, where))
    sort_nodes(proto.graph)
    numbered_strings(proto.graph, {n for node in proto.graph.node for inner in _subgraphs(node)
                                   for n in outer_names(inner)})
    check_graph(proto.graph, set(weights), where)
    elsewhere = [np.ascontiguousarray(weights[t.name]).reshape(-1).view(np.uint8)
                 for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    return Model(proto, where, opsets, weights, (source, *elsewhere))


def _opsets(proto: Any, where: str) -> dict[str, int]:
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in proto.opset_import}
    version = opsets.setdefault("", 1)
    if version < OLDEST:
        for node in proto.graph.node:
            if node.domain in ("", "ai.onnx") and not _as_later(node.op_type, version):
                raise ModelError(
                    f"{node_text(node)} is of opset {version} of ai.onnx, where it had another "
                    f"meaning; terrazzo reads {OLDEST} and later", where=where,
                    hint="convert the model with onnx.version_converter")
    return opsets


def _as_later(operator: str, version: int) -> bool:
    """Whether an operator of an old opset is the one we read: it did not change until then."""
    from onnx import defs

    try:
        return defs.get_schema(operator, version).since_version == defs.get_schema(
            operator, OLDEST).since_version
    except defs.SchemaError:
        return False


def _inlined(onnx: Any, proto: Any, where: str) -> Any:
    from onnx import inliner

    try:
        return inliner.inline_local_functions(proto)
    except Exception as error:
        raise ModelError(f"the model's own functions cannot be inlined: {error}",
                         where=where) from None


# ---------------------------------------------------------------- weights
def _weights(onnx: Any, proto: Any, cut: Cut, data: memoryview, folder: Path | None, where: str
             ) -> Iterator[tuple[str, np.ndarray]]:
    seen: set[str] = set()
    for tensor in proto.graph.initializer:
        if tensor.name in seen:
            raise ModelError(f"two initialisers have the name {tensor.name!r}", where=where)
        seen.add(tensor.name)
        if tensor.name in cut.ranges:
            at, size = cut.ranges[tensor.name]
            yield tensor.name, _raw_array(tensor, data[at:at + size], where)
        else:
            yield tensor.name, tensor_array(tensor, folder, where)
    for sparse in proto.graph.sparse_initializer:
        yield sparse.values.name, sparse_array(sparse, folder, where)


def _checked_shape(tensor: Any, where: str) -> tuple[int, ...]:
    shape = tuple(tensor.dims)
    count = 1
    for n in shape:
        count *= n
    if any(n < 0 for n in shape) or count > _MOST_ELEMENTS:
        raise ModelError(f"tensor {tensor.name!r} has the impossible shape {shape}", where=where)
    return shape


def _raw_array(tensor: Any, raw: Any, where: str) -> np.ndarray:
    """Little-endian raw data as an array, in place where the type allows."""
    shape = _checked_shape(tensor, where)
    dtype = dtype_of(tensor.data_type)
    count = int(np.prod(shape, dtype=np.int64))
    expected = -(-count * dtype.bits // 8) if dtype.bits < 8 and not dtype.is_bool else (
        count * dtype.itemsize)
    if len(raw) != expected:
        raise ModelError(f"tensor {tensor.name!r} of shape {shape} needs {expected} bytes, the "
                         f"file has {len(raw)}", where=where)
    if dtype.bits < 8 and not dtype.is_bool:
        return _unpacked(np.frombuffer(raw, np.uint8), count, dtype).reshape(shape)
    return np.frombuffer(raw, dtype.np).reshape(shape)


def _unpacked(raw: np.ndarray, count: int, dtype: Any) -> np.ndarray:
    """Elements of 2 or 4 bits, several a byte, the first in the lowest bits."""
    each = 8 // dtype.bits
    shifts = np.arange(each, dtype=np.uint8) * dtype.bits
    fields = (raw[:, None] >> shifts & ((1 << dtype.bits) - 1)).reshape(-1)[:count]
    if dtype.kind == "i":
        sign = 1 << (dtype.bits - 1)
        return ((fields ^ sign).astype(np.int8) - sign).astype(dtype.np)
    return fields.view(dtype.np) if dtype.is_float else fields.astype(dtype.np)


def tensor_array(tensor: Any, folder: Path | None, where: str) -> np.ndarray:
    """The array of any TensorProto, external data and strings included."""
    from onnx import TensorProto, numpy_helper

    shape = _checked_shape(tensor, where)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _external(tensor, shape, folder, where)
    if tensor.data_type != STRING and tensor.HasField("raw_data"):
        return _raw_array(tensor, tensor.raw_data, where)
    try:
        return np.asarray(numpy_helper.to_array(tensor)).reshape(shape)
    except Exception as error:
        raise ModelError(f"tensor {tensor.name!r} cannot be read: {error}", where=where) from None


def _external(tensor: Any, shape: tuple[int, ...], folder: Path | None, where: str) -> np.ndarray:
    """Data in another file, which must lie in the model's folder or below."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelError(f"tensor {tensor.name!r} lies in the file {location!r}, but the model was "
                         "given as bytes", where=where,
                         hint="load it from its path, or say which folder the file lies in")
    root = folder.resolve()
    path = (root / location).resolve()
    if not location or os.path.isabs(location) or not path.is_relative_to(root):
        raise ModelError(f"tensor {tensor.name!r} points outside the model's folder: "
                         f"{location!r}", where=where, hint="keep weights beside the model")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", -1))
        size = path.stat().st_size
        length = size - offset if length < 0 else length
        if offset < 0 or offset + length > size:
            raise ValueError(f"the file has {size} bytes, asked for {offset} to {offset + length}")
        raw: Any = np.memmap(path, np.uint8, "r", offset, (length,)) if length else b""
    except (OSError, ValueError) as error:
        raise ModelError(f"the data of tensor {tensor.name!r} cannot be read: {error}",
                         where=where) from None
    return _raw_array(tensor, raw, where)


def sparse_array(sparse: Any, folder: Path | None, where: str) -> np.ndarray:
    """A SparseTensorProto as a dense array."""
    values = tensor_array(sparse.values, folder, where)
    indices = tensor_array(sparse.indices, folder, where)
    shape = tuple(sparse.dims)
    if any(n < 0 for n in shape) or np.prod(shape, dtype=np.float64) > 1 << 31:
        raise ModelError(f"the sparse tensor {sparse.values.name!r} has shape {shape}",
                         where=where)
    dense = np.zeros(shape, values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        raise ModelError(f"the sparse tensor {sparse.values.name!r} makes no sense: {error}",
                         where=where) from None
    return dense


# ---------------------------------------------------------------- sizes
def fix_sizes(graph: Any, sizes: Mapping[str, int]) -> None:
    """Declare numbers for symbolic sizes of a graph's inputs, values and outputs."""
    for info in (*graph.input, *graph.value_info, *graph.output):
        for size in info.type.tensor_type.shape.dim if info.type.HasField("tensor_type") else ():
            if size.dim_param in sizes:
                size.dim_value = sizes[size.dim_param]


# ---------------------------------------------------------------- names and their order
def needed_names(node: Any) -> list[str]:
    """The names a node reads, those that its subgraphs take from outside included."""
    names = [n for n in node.input if n]
    for graph in _subgraphs(node):
        names += outer_names(graph)
    return list(dict.fromkeys(names))


def outer_names(graph: Any) -> list[str]:
    """The names that a subgraph reads but does not define."""
    inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    found: list[str] = []
    for node in graph.node:
        found += [n for n in needed_names(node) if n not in inside]
        inside |= set(node.output)
    return [*found, *(o.name for o in graph.output if o.name not in inside)]


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def sort_nodes(graph: Any) -> None:
    """Put every node behind those it reads from, and otherwise leave them as they are."""
    for node in graph.node:
        for inner in _subgraphs(node):
            sort_nodes(inner)
    maker = {o: i for i, node in enumerate(graph.node) for o in node.output if o}
    needs = [{maker[n] for n in needed_names(node) if n in maker} for node in graph.node]
    if all(k < i for i, before in enumerate(needs) for k in before):
        return
    order: list[int] = []
    placed: set[int] = set()
    readers: dict[int, list[int]] = {}
    for i, before in enumerate(needs):
        for k in before:
            readers.setdefault(k, []).append(i)
    ready = [i for i, before in enumerate(needs) if not before]
    while ready:
        at = heappop(ready)
        order.append(at)
        placed.add(at)
        for i in readers.get(at, ()):
            if needs[i] <= placed:
                heappush(ready, i)
    order += [i for i in range(len(graph.node)) if i not in placed]  # a cycle, which is said later
    nodes = [type(graph.node[i]).FromString(graph.node[i].SerializeToString()) for i in order]
    del graph.node[:]
    graph.node.extend(nodes)


# ---------------------------------------------------------------- checks of structure
def node_text(node: Any) -> str:
    """A node for people: its operator, and its name or first output."""
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    name = node.name or next((o for o in node.output if o), "")
    return f"node {name!r} ({domain}{node.op_type})"


def check_graph(graph: Any, known: set[str], where: str, outer: Iterable[str] = ()) -> None:
    """Every value is made once, before it is used; ModelError names the node that breaks this."""
    _check_texts(graph, where)
    available = {"", *known, *outer, *(i.name for i in graph.input)}
    if len({i.name for i in graph.input}) < len(graph.input):
        raise ModelError("two inputs have the same name", where=where)
    made_later = {o for n in graph.node for o in n.output}
    for node in graph.node:
        text = node_text(node)
        if not node.op_type:
            raise ModelError(f"{text} names no operator", where=where)
        for name in node.input:
            if name not in available:
                why = ("which is made from what it makes: the graph has a cycle"
                       if name in made_later else "which nothing makes")
                raise ModelError(f"{text} reads {name!r}, {why}", where=where)
        for inner in _subgraphs(node):
            names = {t.name for t in inner.initializer}
            check_graph(inner, names, where, available)
        for name in node.output:
            if name and name in available:
                raise ModelError(f"{text} makes {name!r}, which exists already", where=where)
            available.add(name)
    for info in graph.output:
        if info.name not in available or not info.name:
            raise ModelError(f"nothing makes the output {info.name!r}", where=where)


def _check_texts(graph: Any, where: str) -> None:
    """Protobuf hands out a name that is no UTF-8 as bytes, which no other code expects."""
    ends = (*graph.input, *graph.output)
    texts = [graph.name, *(i.name for i in (*ends, *graph.initializer))]
    texts += [d.dim_param for i in ends for d in i.type.tensor_type.shape.dim]
    for node in graph.node:
        texts += [node.op_type, node.domain, node.name, *node.input, *node.output]
        texts += [a.name for a in node.attribute]
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(f"the name {text!r} is not UTF-8", where=where)
