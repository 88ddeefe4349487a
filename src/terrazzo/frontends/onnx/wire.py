"""Large weights left where they lie: cutting raw tensor data out of a serialised model.

A model file is a protobuf message, and parsing it copies every weight twice. So the few fields on
the way to the raw data of initialisers (ModelProto.graph, GraphProto.initializer,
TensorProto.raw_data) are walked here by hand, the data is cut out and remembered as a range of
the file, and what remains, the structure, is small and goes through `onnx` as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_GRAPH, _INITIALIZER, _RAW_DATA, _NAME = 7, 5, 9, 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
LARGE = 1024  # bytes; smaller tensors stay in the structure


class DamagedMessage(ValueError):
    """The bytes are not a protobuf message."""


@dataclass(frozen=True)
class Cut:
    """A model's bytes without its large weights, and where each of those lies in the file."""

    structure: bytes
    ranges: dict[str, tuple[int, int]]  # by name of the initialiser: offset and length


@dataclass(frozen=True)
class _Field:
    number: int
    kind: int
    start: int  # of the field with its tag
    body: int  # of the contents
    end: int


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DamagedMessage("a number runs past the end of its message")


def _fields(data: memoryview, at: int, end: int) -> Iterator[_Field]:
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        body = at
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind == _BYTES:
            length, body = _varint(data, at, end)
            at = body + length
        else:
            raise DamagedMessage(f"a field has the unknown kind {kind}")
        if at > end:
            raise DamagedMessage("a field runs past the end of its message")
        yield _Field(number, kind, start, body, at)


def _length_prefixed(number: int, contents: bytes) -> bytes:
    return _as_varint(number << 3 | _BYTES) + _as_varint(len(contents)) + contents


def _as_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def cut_weights(data: memoryview) -> Cut:
    """Take the large initialisers of the main graph out of a serialised ModelProto."""
    ranges: dict[str, tuple[int, int]] = {}
    parts: list[bytes] = []
    for field in _fields(data, 0, len(data)):
        if field.number == _GRAPH and field.kind == _BYTES:
            inside = b"".join(_graph_parts(data, field, ranges))
            parts.append(_length_prefixed(_GRAPH, inside))
        else:
            parts.append(bytes(data[field.start:field.end]))
    return Cut(b"".join(parts), ranges)


def _graph_parts(data: memoryview, graph: _Field, ranges: dict[str, tuple[int, int]]
                 ) -> Iterator[bytes]:
    for field in _fields(data, graph.body, graph.end):
        small = field.end - field.start < LARGE
        if small or field.number != _INITIALIZER or field.kind != _BYTES:
            yield bytes(data[field.start:field.end])
            continue
        name, kept, raw = "", [], None
        for inner in _fields(data, field.body, field.end):
            if inner.number == _RAW_DATA and inner.kind == _BYTES and (
                    inner.end - inner.body >= LARGE):
                raw = inner
                continue
            if inner.number == _NAME and inner.kind == _BYTES:
                name = bytes(data[inner.body:inner.end]).decode("utf-8", "replace")
            kept.append(bytes(data[inner.start:inner.end]))
        if raw is None or not name or name in ranges:
            yield bytes(data[field.start:field.end])
            continue
        ranges[name] = (raw.body, raw.end - raw.body)
        yield _length_prefixed(_INITIALIZER, b"".join(kept))
