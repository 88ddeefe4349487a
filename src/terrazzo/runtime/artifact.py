"""The one file form of compiled code, in the disk cache and as .tzx: header, object, constants.

    magic | lengths of header, code and constants | sha256 of header and code | checksum of
    constants | header (JSON) | object code | constants, each at a multiple of 64 bytes

Nothing in it is ever evaluated as Python: sizes are trees of integers and names. A file is mapped,
not read: constants are used where they lie, and processes that load one file share their memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from terrazzo.chips.chip import Assembled
from terrazzo.chips.memory import ALIGN, aligned_bytes
from terrazzo.dtypes import as_dtype
from terrazzo.errors import ArtifactError
from terrazzo.index import Algebra, Index, Var, interpret, maximum, minimum
from terrazzo.index.guards import Guard
from terrazzo.loop.packing import Packing
from terrazzo.runtime import checksum
from terrazzo.version import __version__

if TYPE_CHECKING:
    from terrazzo.graph.reach import Reach

MAGIC = b"TZX\x05"
_START = struct.Struct("<4sQQQ32s32s")
# A larger array that is not at a cache line is used where it is: a copy would cost more memory than
# it saves time.
TEXTS = ("name", "origin", "elsewhere")  # of what is said of a kernel; the rest are sizes
_COPIED_BYTES = 1 << 20
Strides = tuple[tuple[Index, ...] | None, ...]  # of each input; None is row major
Over = tuple[int | None, ...]  # of each output: the input that it is written over, if any


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant of compiled code: an array, and how it is to be packed if that is still to do."""

    source: np.ndarray
    packing: Packing | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape if self.packing is None else self.packing.shape

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype if self.packing is None else self.packing.dtype.np

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def array(self) -> np.ndarray:
        """The constant as code reads it, in memory that begins at a cache line."""
        if self.packing is not None:
            room = aligned_bytes(self.nbytes).view(self.dtype)
            return self.packing.apply(self.source, room).reshape(self.shape)
        plain = np.ascontiguousarray(self.source).reshape(self.shape)
        if plain.nbytes > _COPIED_BYTES or plain.ctypes.data % ALIGN == 0:
            return plain
        fresh = aligned_bytes(plain.nbytes).view(plain.dtype).reshape(plain.shape)
        fresh[...] = plain
        return fresh


@dataclass(frozen=True)
class Artifact:
    """Everything an Executable is made of, as plain data."""

    name: str
    inputs: tuple[tuple[str, str, tuple[Index, ...]], ...]  # name, dtype, shape
    outputs: tuple[tuple[str, tuple[Index, ...]], ...]
    arena: Index
    kernels: tuple[Mapping[str, Any], ...]
    chip: str  # by name
    made: Assembled
    constants: tuple[Constant, ...] = ()
    strides: Strides = ()  # of each input in elements; None is row major
    over: Over = ()  # what each output may be written over without harm
    notes: Mapping[str, Any] = field(default_factory=dict)


def index_data(index: Index) -> Any:
    """An index expression as plain data: integers, names and lists."""
    return interpret(index, Algebra(
        constant=int, variable=lambda v: v.name,
        add=lambda a, b: ["+", a, b], multiply=lambda a, b: ["*", a, b],
        floordiv=lambda a, b: ["//", a, b], mod=lambda a, b: ["%", a, b],
        minimum=lambda a, b: ["min", a, b], maximum=lambda a, b: ["max", a, b]))


_OPERATIONS = {
    "+": lambda a, b: a + b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
    "%": lambda a, b: a % b, "min": minimum, "max": maximum,
}


def index_from(data: Any) -> Index:
    """The index expression that `index_data` wrote down."""
    if isinstance(data, int):
        return data
    if isinstance(data, str):
        return Var(data)
    if isinstance(data, list) and len(data) == 3 and data[0] in _OPERATIONS:
        return _OPERATIONS[data[0]](index_from(data[1]), index_from(data[2]))
    raise ArtifactError(f"not a size: {data!r}")


def model_notes(outputs: Sequence[str], shapes: Sequence[Sequence[Index]],
                guards: Sequence[Guard]) -> dict[str, Any]:
    """What a file knows of a model: names of outputs, shapes of inputs, what holds of sizes."""
    return {"outputs": list(outputs), "shapes": [[index_data(n) for n in s] for s in shapes],
            "guards": [[g.relation, index_data(g.left), index_data(g.right)] for g in guards]}


def reach_notes(reaches: Sequence[Reach]) -> dict[str, Any]:
    """What a file knows of indices that data tells: from where to where they may be."""
    return {"reaches": [[index_data(r.low), index_data(r.size), r.where] for r in reaches]} if (
        reaches) else {}


def write(artifact: Artifact, file: BinaryIO) -> None:
    """Write an artifact; constants are packed one by one, so memory holds few of them."""
    header = json.dumps({
        "terrazzo": __version__,
        "name": artifact.name,
        "inputs": [[n, t, [index_data(d) for d in s]] for n, t, s in artifact.inputs],
        "outputs": [[t, [index_data(d) for d in s]] for t, s in artifact.outputs],
        "arena": index_data(artifact.arena),
        "kernels": [{k: v if isinstance(v, str) else index_data(v) for k, v in row.items()}
                    for row in artifact.kernels],
        "chip": artifact.chip,
        "facts": dict(artifact.made.facts),
        "constants": [[as_dtype(c.dtype).name, list(c.shape)] for c in artifact.constants],
        "strides": [s and [index_data(n) for n in s] for s in artifact.strides],
        "over": list(artifact.over),
        "notes": dict(artifact.notes),
    }).encode()
    code = artifact.made.code
    lengths = (len(header), len(code), sum(_padded(c.nbytes) for c in artifact.constants))
    file.write(bytes(_START.size))
    file.write(header)
    file.write(code)
    file.write(bytes(-(_START.size + len(header) + len(code)) % ALIGN))
    digest = checksum.digest(_written(_one_ahead(artifact.constants), file))
    file.seek(0)
    file.write(_START.pack(MAGIC, *lengths, _code_digest(lengths, header, code), digest))


def _written(arrays: Iterable[np.ndarray], file: BinaryIO) -> Iterator[np.ndarray]:
    """Arrays as bytes, each padded and written before it is handed on in two pieces."""
    for array in arrays:
        data = array.reshape(-1).view(np.uint8)
        whole = data.size // ALIGN * ALIGN
        last = np.zeros(_padded(data.size) - whole, np.uint8)
        last[:data.size - whole] = data[whole:]
        file.write(data[:whole].data)
        file.write(last.data)
        yield data[:whole]
        yield last


def _one_ahead(constants: Sequence[Constant]) -> Iterator[np.ndarray]:
    """Each constant as it is stored, while the next one is being packed."""
    if len(constants) < 2:
        yield from (constant.array() for constant in constants)
        return
    from concurrent.futures import Future, ThreadPoolExecutor  # few need it, and it takes 3 ms

    with ThreadPoolExecutor(1) as executor:
        coming: Future[np.ndarray] | None = None
        for number, constant in enumerate(constants):
            array = constant.array() if coming is None else coming.result()
            coming = executor.submit(constants[number + 1].array) if (
                number + 1 < len(constants)) else None
            yield array


def _code_digest(lengths: Sequence[int], header: bytes, code: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<QQQ", *lengths) + header + code).digest()


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def pack(artifact: Artifact) -> bytes:
    """An artifact as bytes."""
    file = io.BytesIO()
    write(artifact, file)
    return file.getvalue()


def save(artifact: Artifact, path: str | os.PathLike[str]) -> None:
    """Write a file; one of that name, which may be mapped somewhere, stays whole until the end."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            write(artifact, file)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def load(path: str | os.PathLike[str], *, remember: bool = False) -> Artifact:
    """The artifact in a file, whose constants stay there; ArtifactError when it is damaged.

    With `remember`, constants are checked once for each file and start of the machine.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size == 0:  # which cannot be mapped
            return unpack(b"", str(path))
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    known = remember and checksum.is_checked(Path(path), status)
    artifact = unpack(content, str(path), check_constants=not known)
    if remember and not known:
        checksum.remember_checked(Path(path), status)
    return artifact


def _let_go_of(data: bytes | mmap.mmap) -> Callable[[np.ndarray], None]:
    """Gives back the pages of a mapped file that some part of it was read from.

    A check reads all there is; what is in memory afterwards is what calls read, of a table of
    words a few rows.
    """
    if not isinstance(data, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return lambda _: None
    start = np.frombuffer(data, np.uint8).ctypes.data

    def let_go(part: np.ndarray) -> None:
        first = part.ctypes.data - start
        pages = [at // mmap.PAGESIZE * mmap.PAGESIZE for at in (first, first + part.nbytes)]
        if pages[0] < pages[1]:
            data.madvise(mmap.MADV_DONTNEED, pages[0], pages[1] - pages[0])

    return let_go


def unpack(data: bytes | mmap.mmap, where: str = "", *, check_constants: bool = True) -> Artifact:
    """The artifact in some bytes; ArtifactError when they are damaged or of another version.

    The checksum of the code is always compared, and the length of everything.
    """
    if data[:3] != MAGIC[:3]:
        raise ArtifactError("this is not a compiled terrazzo file", where=where or None,
                            hint="it should have been written by Executable.save")
    if data[:4] != MAGIC:
        raise ArtifactError(f"the file has format version {data[3:4]!r}, this terrazzo reads "
                            f"{MAGIC[3:4]!r}", where=where or None, hint="compile it again")
    view = memoryview(data)
    damaged = ArtifactError("the file is damaged: its checksum does not match",
                            where=where or None, hint="copy or compile it again")
    if len(view) < _START.size:
        raise damaged
    _, *lengths, code_digest, constants_digest = _START.unpack_from(view)
    code_at = _START.size + lengths[0]
    constants_at = _padded(code_at + lengths[1])
    if constants_at + lengths[2] != len(view):
        raise damaged
    header_text, code = bytes(view[_START.size:code_at]), bytes(view[code_at:code_at + lengths[1]])
    if _code_digest(lengths, header_text, code) != code_digest or any(
            view[code_at + lengths[1]:constants_at]):
        raise damaged
    try:
        header = json.loads(header_text)
        if header["terrazzo"] != __version__:
            raise ArtifactError(f"the file was compiled by terrazzo {header['terrazzo']}, this is "
                                f"{__version__}", where=where or None, hint="compile it again")
        constants = []
        at = constants_at
        pieces = []
        for dtype, shape in header["constants"]:
            kind = as_dtype(dtype).np
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            constants.append(Constant(np.frombuffer(view[at:at + size], kind).reshape(shape)))
            whole, end = at + size // ALIGN * ALIGN, at + _padded(size)
            pieces += [np.frombuffer(view[at:whole], np.uint8),
                       np.frombuffer(view[whole:end], np.uint8)]
            at = end
        if at != len(view) or (
                check_constants
                and checksum.digest_at_once(pieces, _let_go_of(data)) != constants_digest):
            raise damaged
        return Artifact(
            header["name"],
            tuple((n, t, tuple(index_from(d) for d in s)) for n, t, s in header["inputs"]),
            tuple((t, tuple(index_from(d) for d in s)) for t, s in header["outputs"]),
            index_from(header["arena"]),
            tuple({k: v if k in TEXTS else index_from(v) for k, v in row.items()}
                  for row in header["kernels"]),
            header["chip"], Assembled(code, header["facts"]), tuple(constants),
            tuple(s and tuple(index_from(n) for n in s) for s in header["strides"]),
            tuple(header["over"]), header["notes"])
    except (KeyError, ValueError, struct.error, TypeError) as error:
        raise ArtifactError(f"the file's header makes no sense: {error}", where=where or None,
                            hint="compile it again") from error
