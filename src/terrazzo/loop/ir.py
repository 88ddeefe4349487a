"""The nodes of Loop IR. The whole grammar fits on one screen.

    Function = name, params: Buffer*, dims: Var*, body, packed: number of a param -> Packing
    Stmt     = For(var, lo, hi, kind, body) | Block(Stmt*) | If(cond, then, orelse)
             | Alloc(buffer, body) | Store(buffer, index, value, reduce?) | Tile(intrinsic, ...)
             | Let(var, value, body) | While(cond, body)
             | Atomic(kind, buffer, index, value, expected?, old?) | Pause(clock?)
    kind     = serial | parallel | vector | unrolled | program

Buffers are flat: an address is one index expression, so strides are settled above this level.
A vector loop stays a loop over single elements here; the code generator widens it. That keeps the
text readable and lets the interpreter run it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from terrazzo.base.scalar import FromIndex, Load, Scalar, substitute_indices
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.base.scalar_text import format_lines, format_scalar
from terrazzo.base.unwind import Walk, unwind
from terrazzo.dtypes import DType
from terrazzo.index import Index, Var, substitute
from terrazzo.loop.packing import Packing

KINDS = ("serial", "parallel", "vector", "unrolled", "program")
THREADS = Var("threads", 1)
"""How many threads run the kernel: known to it when it runs, so that it can share out its work.

What a kernel computes must not depend on it.
"""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A flat piece of memory: a parameter of the function or local to a scope."""

    name: str
    dtype: DType
    size: Index
    constant: bool = False  # read only in this function
    bounded: bool = True  # false: a bare address, of unknown size, that may overlap others

    def __getitem__(self, index: Index | Scalar) -> Load:
        return Load(self.dtype, self, (index,))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype.short}[{self.size if self.bounded else ''}]"


class Stmt:
    """A statement; see the subclasses."""

    def __str__(self) -> str:
        return "\n".join(format_stmt(self))


@dataclass(frozen=True, eq=False)
class Block(Stmt):
    """Statements in order."""

    stmts: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class For(Stmt):
    """`for lo <= var < hi`; `grain` is the least number of iterations worth a task of its own."""

    var: Var
    lo: Index
    hi: Index
    body: Stmt
    kind: str = "serial"
    grain: Index = 1
    hoist: bool = True  # what stays the same in it may be computed before it


@dataclass(frozen=True, eq=False)
class If(Stmt):
    """Runs one of two statements."""

    cond: Scalar
    then: Stmt
    orelse: Stmt | None = None


@dataclass(frozen=True, eq=False)
class Alloc(Stmt):
    """A buffer that lives as long as `body` runs, private to the task that runs it."""

    buffer: Buffer
    body: Stmt


@dataclass(frozen=True, eq=False)
class Let(Stmt):
    """A name for a computed integer, which indices and bounds in `body` may use."""

    var: Var
    value: Scalar
    body: Stmt


@dataclass(frozen=True, eq=False)
class While(Stmt):
    """Runs `body` again and again, for as long as `cond` holds before it."""

    cond: Scalar
    body: Stmt
    hoist: bool = True  # as of For


@dataclass(frozen=True, eq=False)
class Store(Stmt):
    """`buffer[index] = value`, or `buffer[index] = reduce(buffer[index], value)`."""

    buffer: Buffer
    index: Index | Scalar
    value: Scalar
    reduce: str | None = None
    streaming: bool | Scalar = False  # (when) it will not be read soon: may bypass the caches
    mask: Scalar | None = None  # nothing is stored where it does not hold


ATOMICS = ("add", "max", "min", "and", "or", "xor", "exchange", "compare")


@dataclass(frozen=True, eq=False)
class Atomic(Stmt):
    """`buffer[index] = kind(buffer[index], value)` in one step that no other thread sees half done.

    "exchange" stores the value, "compare" stores it only where `expected` was found, "load" leaves
    memory as it is. What was there before goes to a place in another buffer, `old`.
    """

    kind: str
    buffer: Buffer
    index: Index | Scalar
    value: Scalar
    expected: Scalar | None = None
    old: tuple[Buffer, Index] | None = None


@dataclass(frozen=True, eq=False)
class Pause(Stmt):
    """Lets other threads run, in a loop that waits for them.

    `clock` is a place of 64-bit integers where the time goes, in nanoseconds from some point on.
    """

    clock: tuple[Buffer, Index] | None = None


@dataclass(frozen=True, eq=False)
class TileIntrinsic:
    """A chip's tile instruction: its meaning is Loop IR, its code a template of the generator."""

    name: str
    meaning: Callable[..., Stmt]


@dataclass(frozen=True, eq=False)
class Tile(Stmt):
    """A tile intrinsic applied to places in buffers, index arguments and constants."""

    intrinsic: TileIntrinsic
    places: tuple[tuple[Buffer, Index], ...]
    sizes: tuple[Index, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)

    def expand(self) -> Stmt:
        """What the intrinsic means, as plain loops."""
        return self.intrinsic.meaning(self.places, self.sizes, **self.constants)


@dataclass(frozen=True, eq=False)
class Function:
    """A kernel: buffers and symbolic sizes in, effects on the buffers out."""

    name: str
    params: tuple[Buffer, ...]
    dims: tuple[Var, ...]
    body: Stmt
    origin: str = ""  # the operators it computes, for comments and the profiler
    flops: Index = 0
    bytes: Index = 0
    # Constants that it wants in another layout, by their number among the parameters.
    packed: Mapping[int, Packing] = field(default_factory=dict)
    # The program it was lowered from, if any: a chip may make its code of that instead.
    program: Any = None

    def arranged(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Inputs as the kernel wants them: constants packed where it says so."""
        return [self.packed[i].apply(a) if i in self.packed else a for i, a in enumerate(arrays)]

    def __str__(self) -> str:
        return format_function(self)


def block(*stmts: Stmt | None) -> Stmt:
    """Statements in order, flattened; a single one stands for itself."""
    flat: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, Block):
            flat.extend(stmt.stmts)
        elif stmt is not None:
            flat.append(stmt)
    return flat[0] if len(flat) == 1 else Block(tuple(flat))


# ---------------------------------------------------------------- walking
def walk(stmt: Stmt) -> Iterator[Stmt]:
    """Every statement, outside in."""
    todo = [stmt]  # no recursion: large kernels are thousands of names inside each other
    while todo:
        node = todo.pop()
        yield node
        todo += reversed(children(node))


def children(stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements directly inside one."""
    if isinstance(stmt, Block):
        return stmt.stmts
    if isinstance(stmt, (For, Alloc, Let, While)):
        return (stmt.body,)
    if isinstance(stmt, If):
        return (stmt.then,) if stmt.orelse is None else (stmt.then, stmt.orelse)
    return ()


def roots_of(stmt: Stmt) -> list[Index | Scalar]:
    """The values that a statement computes itself, and where it stores them."""
    if isinstance(stmt, Store):
        return [stmt.index, stmt.value, *([] if stmt.mask is None else [stmt.mask]),
                *([stmt.streaming] if isinstance(stmt.streaming, Scalar) else [])]
    if isinstance(stmt, Let):
        return [stmt.value]
    if isinstance(stmt, Atomic):
        return [stmt.index, stmt.value, *([] if stmt.expected is None else [stmt.expected]),
                *([] if stmt.old is None else [stmt.old[1]])]
    if isinstance(stmt, Pause):
        return [] if stmt.clock is None else [stmt.clock[1]]
    return [stmt.cond] if isinstance(stmt, (If, While)) else []


def indices_of(stmt: Stmt) -> Iterator[Index]:
    """All index expressions of a statement itself: bounds, sizes, places, those inside values."""
    if isinstance(stmt, For):
        yield from (stmt.lo, stmt.hi, stmt.grain)
    elif isinstance(stmt, Alloc):
        yield stmt.buffer.size
    elif isinstance(stmt, Tile):
        yield from (offset for _, offset in stmt.places)
        yield from stmt.sizes
    for root in roots_of(stmt):
        if not isinstance(root, Scalar):
            yield root
            continue
        for node in walk_scalar(root):
            if isinstance(node, FromIndex):
                yield node.index
            elif isinstance(node, Load) and not isinstance(node.indices[0], Scalar):
                yield node.indices[0]


def rewrite(stmt: Stmt, visit: Callable[[Stmt], Stmt | None]) -> Stmt:
    """Rebuild bottom up; `visit` gets each rebuilt statement and may answer with another."""
    return unwind(_rewritten(stmt, visit))


def _rewritten(stmt: Stmt, visit: Callable[[Stmt], Stmt | None]) -> Walk[Stmt]:
    fresh = stmt
    if isinstance(stmt, Block):
        stmts = []
        for s in stmt.stmts:
            stmts.append((yield _rewritten(s, visit)))
        fresh = block(*stmts)
    elif isinstance(stmt, (For, Alloc, Let, While)):
        body = yield _rewritten(stmt.body, visit)
        fresh = stmt if body is stmt.body else replace(stmt, body=body)
    elif isinstance(stmt, If):
        then = yield _rewritten(stmt.then, visit)
        orelse = None if stmt.orelse is None else (yield _rewritten(stmt.orelse, visit))
        fresh = If(stmt.cond, then, orelse)
    answer = visit(fresh)
    return fresh if answer is None else answer


def substitute_vars(stmt: Stmt, values: Mapping[Var, Index]) -> Stmt:
    """Replace index variables in a statement."""
    table = dict(values)

    def index(value: Any) -> Any:
        if isinstance(value, Scalar):
            return substitute_indices(value, table)
        return substitute(value, table)

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, For):
            return replace(node, lo=index(node.lo), hi=index(node.hi), grain=index(node.grain))
        if isinstance(node, Store):
            return replace(node, index=index(node.index), value=index(node.value),
                           mask=None if node.mask is None else index(node.mask))
        if isinstance(node, Let):
            return replace(node, value=index(node.value))
        if isinstance(node, Atomic):
            return replace(
                node, index=index(node.index), value=index(node.value),
                expected=None if node.expected is None else index(node.expected),
                old=None if node.old is None else (node.old[0], index(node.old[1])))
        if isinstance(node, Pause) and node.clock is not None:
            return Pause((node.clock[0], index(node.clock[1])))
        if isinstance(node, While):
            return replace(node, cond=index(node.cond))
        if isinstance(node, If):
            return If(index(node.cond), node.then, node.orelse)
        if isinstance(node, Tile):
            return replace(node, places=tuple((b, index(o)) for b, o in node.places),
                           sizes=tuple(index(s) for s in node.sizes))
        return None

    return rewrite(stmt, visit)


# ---------------------------------------------------------------- printing
_KIND_TEXT = {"serial": "for", "parallel": "parallel for", "vector": "vector for",
              "unrolled": "unrolled for", "program": "program for"}
_REDUCE_TEXT = {"add": "+=", "mul": "*=", "max": "max=", "min": "min=", "and": "&=", "or": "|="}


def format_stmt(stmt: Stmt, indent: int = 0) -> list[str]:
    """The lines of a statement."""
    lines: list[str] = []
    todo: list[tuple[Stmt | str, int]] = [(stmt, indent)]  # a text: a line that follows
    while todo:
        node, depth = todo.pop()
        pad = "    " * depth
        if isinstance(node, str):
            lines.append(pad + node)
            continue
        lines += [pad + line for line in _head(node)]
        inside = depth if isinstance(node, (Block, Let, Alloc)) else depth + 1
        if isinstance(node, If) and node.orelse is not None:
            todo += [(node.orelse, inside), ("else:", depth), (node.then, inside)]
        else:
            todo += [(child, inside) for child in reversed(children(node))]
    return lines


def _head(stmt: Stmt) -> list[str]:
    """What is written of a statement before those inside of it."""
    if isinstance(stmt, Block):
        return [] if stmt.stmts else ["pass"]
    if isinstance(stmt, For):
        return [f"{_KIND_TEXT[stmt.kind]} {stmt.var} in {stmt.lo}..{stmt.hi}:"]
    if isinstance(stmt, If):
        return [f"if {format_scalar(stmt.cond)}:"]
    if isinstance(stmt, Let):
        return [f"let {stmt.var} = {format_scalar(stmt.value)}"]
    if isinstance(stmt, While):
        return [f"while {format_scalar(stmt.cond)}:"]
    if isinstance(stmt, Alloc):
        return [f"alloc {stmt.buffer}"]
    if isinstance(stmt, Store):
        return _format_store(stmt)
    if isinstance(stmt, Atomic):
        index = format_scalar(stmt.index) if isinstance(stmt.index, Scalar) else str(stmt.index)
        given = [v for v in (stmt.expected, stmt.value) if v is not None and stmt.kind != "load"]
        target = f"{stmt.old[0].name}[{stmt.old[1]}] = " if stmt.old is not None else ""
        return [f"{target}atomic_{stmt.kind}("
                f"{', '.join([f'&{stmt.buffer.name}[{index}]', *map(format_scalar, given)])})"]
    if isinstance(stmt, Pause):
        target = f"{stmt.clock[0].name}[{stmt.clock[1]}] = " if stmt.clock is not None else ""
        return [f"{target}pause()"]
    assert isinstance(stmt, Tile)
    places = [f"&{b.name}[{o}]" for b, o in stmt.places]
    rest = [str(s) for s in stmt.sizes] + [f"{k}={v}" for k, v in stmt.constants.items()]
    return [f"{stmt.intrinsic.name}({', '.join(places + rest)})"]


def _format_store(stmt: Store) -> list[str]:
    index = format_scalar(stmt.index) if isinstance(stmt.index, Scalar) else str(stmt.index)
    sign = _REDUCE_TEXT[stmt.reduce] if stmt.reduce else "="
    note = "  # streaming" if stmt.streaming is not False else ""
    if isinstance(stmt.streaming, Scalar):
        note += f" if {format_scalar(stmt.streaming)}"
    if stmt.mask is not None:
        note = f" if {format_scalar(stmt.mask)}{note}"
    *shared, value = format_lines(stmt.value)
    return [*shared, f"{stmt.buffer.name}[{index}] {sign} {value}{note}"]


def format_function(function: Function) -> str:
    """The text form of a kernel."""
    params: Sequence[str] = [str(p) for p in function.params] + [f"{d}: dim" for d in function.dims]
    head = f"kernel {function.name}({', '.join(params)}):"
    note = [f"    # {function.origin}"] if function.origin else []
    note += [f"    # {function.params[i].name} packed: {packing.text}"
             for i, packing in function.packed.items()]
    return "\n".join([head, *note, *format_stmt(function.body, 1)])
