"""The one file form of compiled code, in the disk cache and as .tzx: header, object, constants.

    magic | sha256 of the rest | length of header | header (JSON) | object code | constants

Nothing in it is ever evaluated as Python: sizes are trees of integers and names.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import ArtifactError
from terrazzo.index import Algebra, Index, Var, interpret, maximum, minimum
from terrazzo.version import __version__

MAGIC = b"TZX\x02"
Strides = tuple[tuple[Index, ...] | None, ...]  # of each input; None is row major


@dataclass(frozen=True)
class Artifact:
    """Everything an Executable is made of, as plain data."""

    name: str
    inputs: tuple[tuple[str, str, tuple[Index, ...]], ...]  # name, dtype, shape
    outputs: tuple[tuple[str, tuple[Index, ...]], ...]
    arena: Index
    kernels: tuple[Mapping[str, Any], ...]
    features: tuple[str, ...]
    triple: str
    object_code: bytes
    constants: tuple[np.ndarray, ...] = ()
    strides: Strides = ()  # of each input in elements; None is row major
    notes: Mapping[str, Any] = field(default_factory=dict)


def _to_data(index: Index) -> Any:
    return interpret(index, Algebra[Any](
        constant=int, variable=lambda v: v.name,
        add=lambda a, b: ["+", a, b], multiply=lambda a, b: ["*", a, b],
        floordiv=lambda a, b: ["//", a, b], mod=lambda a, b: ["%", a, b],
        minimum=lambda a, b: ["min", a, b], maximum=lambda a, b: ["max", a, b]))


_OPERATIONS = {
    "+": lambda a, b: a + b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
    "%": lambda a, b: a % b, "min": minimum, "max": maximum,
}


def _from_data(data: Any) -> Index:
    if isinstance(data, int):
        return data
    if isinstance(data, str):
        return Var(data)
    if isinstance(data, list) and len(data) == 3 and data[0] in _OPERATIONS:
        return _OPERATIONS[data[0]](_from_data(data[1]), _from_data(data[2]))
    raise ArtifactError(f"not a size: {data!r}")


def pack(artifact: Artifact) -> bytes:
    """An artifact as bytes."""
    header = json.dumps({
        "terrazzo": __version__,
        "name": artifact.name,
        "inputs": [[n, t, [_to_data(d) for d in s]] for n, t, s in artifact.inputs],
        "outputs": [[t, [_to_data(d) for d in s]] for t, s in artifact.outputs],
        "arena": _to_data(artifact.arena),
        "kernels": [{k: v if isinstance(v, str) else _to_data(v) for k, v in row.items()}
                    for row in artifact.kernels],
        "features": list(artifact.features),
        "triple": artifact.triple,
        "object": len(artifact.object_code),
        "constants": [[as_dtype(c.dtype).name, list(c.shape)] for c in artifact.constants],
        "strides": [s and [_to_data(n) for n in s] for s in artifact.strides],
        "notes": dict(artifact.notes),
    }).encode()
    blobs = [np.ascontiguousarray(c).tobytes() for c in artifact.constants]
    rest = b"".join([struct.pack("<Q", len(header)), header, artifact.object_code, *blobs])
    return MAGIC + hashlib.sha256(rest).digest() + rest


def unpack(data: bytes, where: str = "") -> Artifact:
    """The artifact in some bytes; ArtifactError when they are damaged or of another version."""
    if data[:3] != MAGIC[:3]:
        raise ArtifactError("this is not a compiled terrazzo file", where=where or None,
                            hint="it should have been written by Executable.save")
    if data[:4] != MAGIC:
        raise ArtifactError(f"the file has format version {data[3:4]!r}, this terrazzo reads "
                            f"{MAGIC[3:4]!r}", where=where or None, hint="compile it again")
    rest = data[36:]
    if hashlib.sha256(rest).digest() != data[4:36]:
        raise ArtifactError("the file is damaged: its checksum does not match",
                            where=where or None, hint="copy or compile it again")
    try:
        (length,) = struct.unpack_from("<Q", rest)
        header = json.loads(rest[8:8 + length])
        if header["terrazzo"] != __version__:
            raise ArtifactError(f"the file was compiled by terrazzo {header['terrazzo']}, this is "
                                f"{__version__}", where=where or None, hint="compile it again")
        at = 8 + length
        code = rest[at:at + header["object"]]
        at += header["object"]
        constants = []
        for dtype, shape in header["constants"]:
            kind = as_dtype(dtype).np
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            constants.append(_aligned_copy(rest[at:at + size], kind, shape))
            at += size
        return Artifact(
            header["name"],
            tuple((n, t, tuple(_from_data(d) for d in s)) for n, t, s in header["inputs"]),
            tuple((t, tuple(_from_data(d) for d in s)) for t, s in header["outputs"]),
            _from_data(header["arena"]),
            tuple({k: v if k in ("name", "origin") else _from_data(v) for k, v in row.items()}
                  for row in header["kernels"]),
            tuple(header["features"]), header["triple"], code, tuple(constants),
            tuple(s and tuple(_from_data(n) for n in s) for s in header["strides"]),
            header["notes"])
    except (KeyError, ValueError, struct.error, TypeError) as error:
        raise ArtifactError(f"the file's header makes no sense: {error}", where=where or None,
                            hint="compile it again") from error


def aligned_bytes(size: int) -> np.ndarray:
    """Fresh bytes that begin at a cache line."""
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size]


def _aligned_copy(data: bytes, kind: np.dtype, shape: Sequence[int]) -> np.ndarray:
    array = aligned_bytes(len(data))
    array[:] = np.frombuffer(data, np.uint8)
    return array.view(kind).reshape(shape)
