"""Images: what gcuModuleLoadData takes, written and read (docs/gcu.md has the layout)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.chips.gcu.library import library
from terrazzo.errors import ArtifactError, MissingDependency

MAGIC = b"GCUIMAGE"
VERSION = 1
KINDS = "phifc"
"""Of arguments: an address of the device, one of the host, an integer, the bits of a float, and the
counters of a plan, which the library fills in."""

# magic, version, functions, size of the whole, checksum of what follows, fingerprint of the chip
_HEADER = struct.Struct("<8sIIQQ32s")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_FNV_START, _FNV_PRIME, _U64_MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


@dataclass(frozen=True)
class ImageFunction:
    """One function of an image: a kernel, or a plan that calls several."""

    name: str
    symbol: str
    """Its entry in the object code."""
    arguments: str
    """One letter of `KINDS` for each argument, or slot of a plan."""
    calls: tuple[str, ...] = ()
    """The kernels of a plan, in order; a kernel is its own only one."""
    is_plan: bool = False
    scratchpad: int = 0
    """Bytes of local memory that a program wants."""


@dataclass(frozen=True)
class Image:
    """An image taken apart."""

    fingerprint: bytes
    functions: tuple[ImageFunction, ...]
    object_code: bytes


def write_image(
    object_code: bytes, functions: Sequence[ImageFunction], fingerprint: str | bytes
) -> bytes:
    """An image of object code for the chip of that fingerprint."""
    chip = fingerprint.encode() if isinstance(fingerprint, str) else bytes(fingerprint)
    if len(chip) != 32:
        raise ArtifactError(f"the fingerprint of a chip has 32 bytes, not {len(chip)}")
    body = b"".join(map(_function_bytes, functions)) + _U64.pack(len(object_code)) + object_code
    header = _HEADER.pack(MAGIC, VERSION, len(functions), _HEADER.size + len(body),
                          checksum(body), chip)
    return header + body


def read_image(data: bytes) -> Image:
    """Take an image apart; one that is damaged raises `ArtifactError`."""
    if len(data) < _HEADER.size or data[:len(MAGIC)] != MAGIC:
        raise ArtifactError(f"{len(data)} bytes that do not begin as an image of gcu does")
    _, version, count, size, total, fingerprint = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ArtifactError(f"an image of version {version}, where {VERSION} is read",
                            hint="make it again with this terrazzo")
    body = data[_HEADER.size:]
    if size != len(data) or total != checksum(body):
        raise ArtifactError("an image of gcu is damaged", hint="make it again")
    reader = _Reader(body)
    functions = tuple(_take_function(reader) for _ in range(count))
    object_code = reader.take(reader.number(_U64))
    if reader.at != len(body):
        raise ArtifactError("an image of gcu goes on after its object code", hint="make it again")
    return Image(fingerprint, functions, object_code)


def checksum(data: bytes) -> int:
    """FNV-1a of 64 bits: by the library where there is one, which is a thousand times faster."""
    try:
        return int(library().gcuImageChecksum(ctypes.c_char_p(data), len(data)))
    except MissingDependency:
        return plain_checksum(data)


def plain_checksum(data: bytes) -> int:
    """The same in Python."""
    total = _FNV_START
    for byte in data:
        total = (total ^ byte) * _FNV_PRIME & _U64_MASK
    return total


def _function_bytes(function: ImageFunction) -> bytes:
    calls = function.calls if function.is_plan else (function.calls or (function.name,))
    known = KINDS if function.is_plan else KINDS.replace("c", "")
    if set(function.arguments) - set(known):
        raise ArtifactError(f"arguments of kinds {function.arguments!r}, where {known!r} are known")
    if not function.is_plan and len(calls) != 1:
        raise ArtifactError(f"the kernel {function.name} has {len(calls)} calls, not one")
    return b"".join([
        _text(function.name), _text(function.symbol), _U32.pack(int(function.is_plan)),
        _U64.pack(function.scratchpad), _text(function.arguments), _U32.pack(len(calls)),
        *map(_text, calls)])


def _text(text: str) -> bytes:
    data = text.encode()
    if b"\0" in data:
        raise ArtifactError(f"a name with a zero in it: {text!r}")
    return _U32.pack(len(data)) + data


class _Reader:
    """Bytes that are taken one part after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ArtifactError("an image of gcu ends too early", hint="make it again")
        self.at += size
        return self.data[self.at - size: self.at]

    def number(self, form: struct.Struct) -> int:
        return int(form.unpack(self.take(form.size))[0])

    def text(self) -> str:
        return self.take(self.number(_U32)).decode()


def _take_function(reader: _Reader) -> ImageFunction:
    name, symbol = reader.text(), reader.text()
    is_plan, scratchpad = bool(reader.number(_U32)), reader.number(_U64)
    arguments = reader.text()
    calls = tuple(reader.text() for _ in range(reader.number(_U32)))
    return ImageFunction(name, symbol, arguments, calls, is_plan, scratchpad)


__all__ = ["Image", "ImageFunction", "KINDS", "VERSION", "checksum", "plain_checksum",
           "read_image", "write_image"]
