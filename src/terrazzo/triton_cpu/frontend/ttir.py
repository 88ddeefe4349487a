"""TTIR as data, and a reader of MLIR's generic text form of it.

The generic form is regular: one operation a line, regions in `({ ... }, { ... })`, locations as
aliases at the end of the text. So the reader goes line by line and takes each apart with one
pattern; it knows no operation by name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.errors import CodegenError


@dataclass(frozen=True)
class Type:
    """The type of a value: a tile of elements, or one element where the shape is ()."""

    shape: tuple[int, ...]
    elem: str  # f32, i1, i32, ...; of a pointer, what it points to
    pointer: bool = False
    is_tile: bool = False

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(eq=False)
class Block:
    """Operations in order, and the values that come in with a jump."""

    label: str
    args: list[tuple[str, Type]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """One operation with its operands, results, attributes, regions and place in the source."""

    name: str
    operands: list[str]
    results: list[str]
    attrs: dict[str, Any]
    successors: list[str]
    regions: list[list[Block]] = field(default_factory=list)
    operand_types: list[Type] = field(default_factory=list)
    types: list[Type] = field(default_factory=list)
    loc: str = ""

    @property
    def type(self) -> Type:
        return self.types[0]


@dataclass(eq=False)
class Module:
    """All functions of a kernel, and what its location aliases stand for."""

    functions: dict[str, Op]
    locations: dict[str, str]

    @property
    def entry(self) -> Op:
        return next(f for f in self.functions.values()
                    if f.attrs.get("sym_visibility") == "public")

    def callee(self, op: Op) -> list[Block]:
        """The body of the function that an operation calls."""
        return self.functions[str(op.attrs["callee"]).lstrip("@")].regions[0]

    def where(self, op: Op) -> str:
        """The innermost line outside Triton's own library that an operation comes from."""
        return _innermost_user_line(op.loc, self.locations)


def walk(blocks: list[Block]) -> Iterator[Op]:
    """Every operation, outside in."""
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from walk(region)


# ---------------------------------------------------------------- lines
_OP = re.compile(
    r'^(?:(?P<results>%[^"=]*?) = )?"(?P<name>[\w.\-]+)"\((?P<operands>[^)]*)\)'
    r'(?P<successors> ?\[[^\]]*\])?(?P<rest>.*)$')
_LOC = re.compile(r" loc\((?P<loc>.*)\)$")
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_BLOCK = re.compile(r"^(\^[\w.$\-]+)(?:\((.*)\))?:")


def parse(text: str) -> Module:
    """Read a module in generic form."""
    locations: dict[str, str] = {}
    root: list[list[Block]] = [[Block("")]]
    stack: list[tuple[Op | None, list[list[Block]]]] = [(None, root)]
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("//"):
            continue
        if line[0] == "#":
            alias = _ALIAS.match(line)
            if alias:
                locations[alias[1]] = alias[2]
        elif line[0] == "^":
            _open_block(line, stack[-1][1][-1])
        elif line.startswith("}, {"):
            stack[-1][1].append([Block("")])
        elif line.startswith("})"):
            op, regions = stack.pop()
            assert op is not None
            op.regions = [[b for b in region if b.ops or b.args or b.label] for region in regions]
            _finish(op, line[2:])
        else:
            op, rest = _start(line)
            stack[-1][1][-1][-1].ops.append(op)
            if rest.endswith("({"):
                properties, _ = _properties(rest[:-2])
                op.attrs.update(properties)
                stack.append((op, [[Block("")]]))
            else:
                _finish(op, rest)
    module = root[0][0].ops[0]
    functions = {f.attrs["sym_name"]: f for f in module.regions[0][0].ops if f.name == "tt.func"}
    for function in functions.values():
        _make_unique(function.regions[0], set(), {})
    return Module(functions, locations)


def _make_unique(blocks: list[Block], taken: set[str], current: dict[str, str]) -> None:
    """Give every value of a function a name of its own: regions side by side share theirs."""

    def defined(name: str) -> str:
        fresh, number = name, 0
        while fresh in taken:
            number += 1
            fresh = f"{name}.{number}"
        taken.add(fresh)
        current[name] = fresh
        return fresh

    for block in blocks:
        block.args = [(defined(name), type_) for name, type_ in block.args]
        for op in block.ops:
            op.operands = [current.get(o, o) for o in op.operands]
            op.results = [defined(r) for r in op.results]
            for region in op.regions:
                _make_unique(region, taken, current)


def _start(line: str) -> tuple[Op, str]:
    match = _OP.match(line)
    if match is None:
        raise CodegenError(f"this line of TTIR cannot be read: {line[:200]}",
                           hint="this version of Triton may be too new for terrazzo")
    results: list[str] = []
    for name in (match["results"] or "").split(","):
        name, _, many = name.strip().partition(":")
        if many:
            results += [f"{name}#{i}" for i in range(int(many))]
        elif name:
            results.append(name)
    operands = [o.strip() for o in match["operands"].split(",") if o.strip()]
    targets = [t.strip() for t in (match["successors"] or "").strip(" []").split(",") if t.strip()]
    return Op(match["name"], operands, results, {}, targets), match["rest"]


def _finish(op: Op, rest: str) -> None:
    """What follows the operands or the regions: attributes, types, location."""
    loc = _LOC.search(rest)
    if loc:
        op.loc = loc["loc"]
        rest = rest[: loc.start()]
    properties, rest = _properties(rest)
    op.attrs.update(properties)
    rest = rest.strip()
    if rest.startswith("{"):
        end = _closing(rest, 0)
        op.attrs.update(_attributes(rest[1:end]))
        rest = rest[end + 1:].strip()
    if not rest.startswith(":"):
        return
    given, _, made = _split_arrow(rest[1:].strip())
    op.operand_types = [parse_type(t) for t in split_top(given[1:-1])]
    op.types = [parse_type(t) for t in split_top(made[1:-1] if made.startswith("(") else made)]


def _split_arrow(text: str) -> tuple[str, str, str]:
    end = _closing(text, 0)
    return text[: end + 1], "->", text[end + 1:].strip().removeprefix("->").strip()


def _open_block(line: str, region: list[Block]) -> None:
    match = _BLOCK.match(line)
    assert match is not None, line
    args = []
    for item in split_top(match[2] or ""):
        name, _, rest = item.partition(":")
        args.append((name.strip(), parse_type(rest.strip().split(" loc(")[0])))
    block = Block(match[1], args)
    if len(region) == 1 and not region[0].label and not region[0].ops:
        region[0] = block
    else:
        region.append(block)


def _properties(rest: str) -> tuple[dict[str, Any], str]:
    start = rest.find("<{")
    if start < 0 or rest[:start].strip():
        return {}, rest
    end = rest.index("}>", start)
    while rest.count('"', start, end) % 2:  # inside a string
        end = rest.index("}>", end + 1)
    return _attributes(rest[start + 2: end]), rest[end + 2:]


def _attributes(text: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for item in split_top(text):
        name, sign, value = item.partition("=")
        table[name.strip().strip('"')] = parse_attribute(value.strip()) if sign else True
    return table


_OPEN, _CLOSE = frozenset("([{<"), frozenset(")]}>")
_SIGN = re.compile(r'"(?:[^"\\]|\\.)*"|->|[][(){}<>,]')


def _signs(text: str, start: int = 0) -> Iterator[tuple[str, int, int]]:
    """Brackets and commas outside strings: each with its place and how many are open after it."""
    depth = 0
    for found in _SIGN.finditer(text, start):
        sign = found[0]
        if sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            depth -= 1
        yield sign, found.start(), depth


def split_top(text: str) -> list[str]:
    """Split at the commas that are in no bracket and no string."""
    parts, begin = [], 0
    for sign, place, depth in _signs(text):
        if sign == "," and depth == 0:
            parts.append(text[begin:place].strip())
            begin = place + 1
    parts.append(text[begin:].strip())
    return [p for p in parts if p]


def _closing(text: str, start: int) -> int:
    """Where the bracket at a place is closed."""
    for sign, place, depth in _signs(text, start):
        if depth == 0 and sign in _CLOSE:
            return place
    raise CodegenError(f"a bracket is not closed in TTIR: {text[start:start + 80]}")


# ---------------------------------------------------------------- types and attributes
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(.*)>$")
_POINTER = re.compile(r"!tt\.ptr<([^,>]+)(?:, \d+)?>$")


@lru_cache(4096)
def parse_type(text: str) -> Type:
    """A type from its text; what is neither tile nor pointer keeps its text as the element."""
    text = text.strip()
    tensor = _TENSOR.match(text)
    if tensor:
        shape = tuple(int(n) for n in tensor[1].split("x") if n)
        inner = parse_type(tensor[2])
        return Type(shape, inner.elem, inner.pointer, True)
    pointer = _POINTER.match(text)
    if pointer:
        return Type((), pointer[1], True)
    return Type((), text)


_TYPED_INT = re.compile(r"(-?\d+) : (\w+)$")
_FLOATS = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}


def parse_attribute(text: str) -> Any:
    """Numbers, truth values, strings, arrays and dense constants; other things stay text."""
    if text in ("true", "false"):
        return text == "true"
    number = _TYPED_INT.match(text)
    if number and not number[2].startswith(("f", "b")):
        return int(number[1])
    if text.startswith('"') and text.endswith('"'):
        return _unescape(text[1:-1])
    if text.startswith("array<"):
        items = text[6:-1].partition(":")[2]
        return [parse_attribute(i.strip()) if i.strip() in ("true", "false") else int(i)
                for i in items.split(",") if i.strip()]
    if text.startswith("dense<"):
        end = _closing(text, 5)
        return _dense(text[6:end], parse_type(text[end + 1:].partition(":")[2]))
    value, sign, kind = text.partition(" : ")
    if sign and (kind in _FLOATS or kind.startswith(("bf16", "f8"))):
        return parse_number(value, kind)
    return text


def parse_number(text: str, elem: str) -> Any:
    """A number of some element type; floats may be given by their bits."""
    if text in ("true", "false"):
        return text == "true"
    if elem.startswith("i") or elem == "index":
        return int(text, 0)
    if not text.startswith("0x"):
        return float(text)
    bits = int(text, 16)
    if elem == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    if elem in _FLOATS:
        as_float, as_int = _FLOATS[elem]
        return struct.unpack(as_float, struct.pack(as_int, bits))[0]
    from terrazzo.triton_cpu.frontend.values import dtype_of

    return float(np.array([bits], np.uint8).view(dtype_of(elem).np)[0].astype(np.float32))


def _dense(text: str, kind: Type) -> Any:
    """The one number of all elements, or a flat list of them."""
    if text.startswith('"0x'):
        from terrazzo.triton_cpu.frontend.values import dtype_of

        data = bytes.fromhex(text.strip('"')[2:])
        return [x.item() for x in np.frombuffer(data, dtype_of(kind.elem).np)]
    if not text.startswith("["):
        return parse_number(text, kind.elem)
    return [parse_number(n.strip(" []"), kind.elem) for n in text.split(",")]


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-9A-Fa-f]{2})|\\(.)",
                  lambda m: chr(int(m[1], 16)) if m[1] else m[2], text)


# ---------------------------------------------------------------- locations
_PLACE = re.compile(r'"([^"]+)":(\d+)(?::\d+)?')
_REFERENCE = re.compile(r"#loc\d*")


def _innermost_user_line(loc: str, locations: dict[str, str]) -> str:
    """The last place in a chain of calls that is not Triton's own library."""
    places: list[str] = []

    def visit(text: str) -> None:
        for found in re.finditer(r'"[^"]+":\d+(?::\d+)?|#loc\d*', text):
            item = found[0]
            if item.startswith("#"):
                visit(locations.get(item, ""))
            else:
                match = _PLACE.match(item)
                assert match is not None
                places.append(f"{match[1]}:{match[2]}")

    visit(loc)
    users = [p for p in places if "/triton/language/" not in p]
    return (users or places or ["unknown place"])[0]
