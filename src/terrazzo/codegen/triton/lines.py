"""Lines of Triton in their scopes, and index arithmetic as text.

A kernel has two kinds of index: the *row*, which its program instance decides, and *positions*
inside a row, which are a `Block` of numbers, at once or in a loop. Every text knows the indices it
depends on. That settles three things by itself: the mask a load needs, the scope a line belongs to
(what does not change in a loop lands before it), and how tiles broadcast.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from terrazzo.base.scalar import Axis
from terrazzo.codegen.triton.spelling import ATOM, COMPARE, PRODUCT, SUM, UNARY
from terrazzo.dtypes import DType, bool_
from terrazzo.index import FloorDiv, Index, IndexExpr, Max, Min, Mod, Sum, Var, bounds

WIDTH = 100

Deps = frozenset[Var]
NO_DEPS: Deps = frozenset()


@dataclass(frozen=True)
class Value:
    """A piece of Triton text and what is known about it."""

    text: str
    level: int = ATOM
    deps: Deps = NO_DEPS
    dtype: DType | None = None
    literal: bool = False
    index: Index | None = None  # set for what is index arithmetic: its integer type is open

    def inside(self, least: int) -> str:
        """The text as part of another that binds this tightly."""
        return self.text if self.level >= least else f"({self.text})"


@dataclass(frozen=True)
class Guard:
    """Conditions of the `where`s around a load: outside them it must not touch memory."""

    conditions: tuple[Value, ...] = ()

    @property
    def deps(self) -> Deps:
        return NO_DEPS.union(*(c.deps for c in self.conditions))


NO_GUARD = Guard()


@dataclass(frozen=True)
class Block:
    """One index variable as Triton sees it: where its numbers come from and where they end."""

    var: Var
    name: str
    extent: Index
    declaration: str | None = None  # the line's right side; None while a loop declares it
    size: str = ""  # the constexpr that holds its number of lanes; empty for a single number
    exact: bool = False  # every lane is inside
    looped: bool = False


@dataclass(eq=False)
class Scope:
    """Lines of one indentation, and what has a name in them."""

    binds: set[Var]
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # a right side -> its variable
    values: dict[tuple[object, ...], Value] = field(default_factory=dict)
    declared: list[str] = field(default_factory=list)


class Names:
    """Identifiers, each given once."""

    def __init__(self, taken: Sequence[str]):
        self.taken = set(taken)

    def fresh(self, wanted: str) -> str:
        """The wanted name, or that name with a number."""
        base = re.sub(r"\W", "_", wanted) or "t"
        if keyword.iskeyword(base) or base[0].isdigit():
            base = f"v_{base}"
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name


class Lines:
    """The lines of one kernel, by scope, and its index variables."""

    def __init__(self, names: Names, dims: Mapping[Var, str], *, tile: bool, wide: bool):
        self.names, self.dims, self.tile, self.wide = names, dims, tile, wide
        self.blocks: dict[Var, Block] = {}
        self.axes: dict[Index, Axis] = {}  # the program's axes in terms of index variables
        self.scopes = [Scope(set())]

    # ------------------------------------------------------------ lines
    def scope_of(self, deps: Deps) -> Scope:
        """The outermost scope in which all of these variables are known."""
        known: set[Var] = set()
        for scope in self.scopes:
            known |= scope.binds
            if deps <= known:
                return scope
        raise AssertionError(f"no loop over {deps - known} is open")

    def line(self, text: str, deps: Deps, comment: str = "") -> None:
        scope = self.scope_of(deps)
        indent = "    " * (self.scopes.index(scope) + 1)
        full = f"{indent}{text}  # {comment}" if comment else indent + text
        if comment and len(full) > WIDTH:
            scope.lines.append(f"{indent}# {comment}")
            full = indent + text
        scope.lines.append(full)

    def bind(self, value: Value, hint: str, comment: str = "") -> Value:
        """Give a value a name, unless it is one or has one."""
        if value.text.isidentifier() and not value.literal:
            return value
        for scope in self.scopes:
            if value.text in scope.names:
                return replace(value, text=scope.names[value.text], level=ATOM)
        name = self.names.fresh(hint)
        self.line(f"{name} = {value.text}", value.deps, comment)
        scope = self.scope_of(value.deps)
        scope.names[value.text] = name
        scope.declared.append(name)
        return replace(value, text=name, level=ATOM, literal=False)

    def recall(self, key: tuple[object, ...]) -> Value | None:
        return next((s.values[key] for s in self.scopes if key in s.values), None)

    def remember(self, key: tuple[object, ...], value: Value) -> Value:
        self.scope_of(value.deps).values[key] = value
        return value

    # ------------------------------------------------------------ index variables
    def add_block(self, block: Block) -> None:
        """Make an index variable known; a looped one is declared by its loop."""
        self.blocks[block.var] = block
        if not block.looped:
            self.scopes[0].binds.add(block.var)

    def variable(self, var: Var) -> Value:
        if var not in self.blocks:
            return Value(self.dims[var], index=var)
        block, deps = self.blocks[var], frozenset((var,))
        if block.declaration is not None:
            key = ("variable", var)
            if self.recall(key) is None:
                self.line(f"{block.name} = {block.declaration}", deps)
                self.remember(key, Value(block.name, deps=deps))
        return Value(block.name, deps=deps, index=var)

    def is_block(self, deps: Iterable[Var]) -> bool:
        """Whether what depends on these index variables has lanes, or is a single value."""
        return any(self.blocks[var].size for var in deps)

    def mask(self, deps: Deps) -> Value | None:
        """Which lanes of these index variables are inside, or None when all are."""
        parts = []
        for block in self.blocks.values():
            if block.var in deps and block.size and not block.exact:
                bound = self.index(block.extent)
                text = f"{self.variable(block.var).text} < {bound.inside(SUM)}"
                part = Value(text, COMPARE, frozenset((block.var,)), bool_)
                parts.append(self.bind(part, f"{block.name}_mask" if self.tile else "mask"))
        if len(parts) < 2:
            return parts[0] if parts else None
        both = Value(" & ".join(p.text for p in parts), 0, frozenset().union(
            *(p.deps for p in parts)), bool_)
        return self.bind(both, "mask")

    @contextmanager
    def position(self, block: Block) -> Iterator[None]:
        """A scope in which a position is known: a loop, or nothing when the block holds a row."""
        if not block.looped:
            yield
            return
        outer = self.scopes[-1]
        indent = "    " * (len(self.scopes) + 1)
        start = self.names.fresh("start")
        lanes = f"tl.arange(0, {block.size}){'[:, None]' if self.tile else ''}"
        numbers = f"({start} + {lanes}).to(tl.int64)" if self.wide else f"{start} + {lanes}"
        scope = Scope({block.var}, [f"{indent}{block.name} = {numbers}"])
        bound = self.index(block.extent).text
        self.scopes.append(scope)
        yield
        self.scopes.pop()
        self.names.taken -= {start, *scope.declared}  # the next loop may call its values the same
        head = f"for {start} in range(0, {bound}, {block.size}):"
        outer.lines += ["    " * len(self.scopes) + head, *scope.lines]

    @contextmanager
    def loop(self, head: str, binds: set[Var]) -> Iterator[None]:
        """A loop in which more index variables are known."""
        outer = self.scopes[-1]
        scope = Scope(binds)
        self.scopes.append(scope)
        yield
        self.scopes.pop()
        self.names.taken -= set(scope.declared)
        outer.lines += ["    " * len(self.scopes) + head, *scope.lines]

    @contextmanager
    def row_level(self) -> Iterator[None]:
        """Leave the loops for a while: what follows concerns whole rows."""
        saved, self.scopes = self.scopes, self.scopes[:1]
        yield
        self.scopes = saved

    # ------------------------------------------------------------ index expressions
    def index(self, e: Index) -> Value:
        """An index expression; quotients that are an axis of the program get its name."""
        if not isinstance(e, IndexExpr):
            return Value(str(e), ATOM if e >= 0 else UNARY, index=e)
        if isinstance(e, Var):
            return self.variable(e)
        if e in self.axes:
            value = self.bind(self.index_text(e), self.axes[e].var.name)
            return replace(value, index=e)
        return self.index_text(e)

    def index_text(self, e: IndexExpr) -> Value:
        if isinstance(e, FloorDiv | Mod):
            top, bottom = self.index(e.num), self.index(e.den)
            deps = top.deps | bottom.deps
            low = bounds(e.num)[0]
            divides = isinstance(e, FloorDiv)
            if low is None or low < 0:  # Triton divides towards zero
                name = "_floor_div" if divides else "_floor_mod"
                return Value(f"{name}({top.text}, {bottom.text})", deps=deps, index=e)
            text = f"{top.inside(PRODUCT)} {'//' if divides else '%'} {bottom.inside(ATOM)}"
            return Value(text, PRODUCT, deps, index=e)
        if isinstance(e, Min | Max):
            name = "tl.minimum" if isinstance(e, Min) else "tl.maximum"
            first, *rest = (self.index(arg) for arg in e.args)
            for other in rest:
                first = Value(f"{name}({first.text}, {other.text})",
                              deps=first.deps | other.deps, index=e)
            return first
        assert isinstance(e, Sum)
        text, deps = "", NO_DEPS
        # From the slowest index to the fastest, as addresses are usually written.
        for monomial, factor in sorted(e.terms, key=lambda t: (t[1] < 0, -len(t[0]), -t[1])):
            product = self.product(monomial, abs(factor))
            sign = "-" if factor < 0 else "+"
            deps |= product.deps
            if text:
                text += f" {sign} {product.inside(PRODUCT)}"
            else:
                text = product.inside(SUM) if factor > 0 else f"-{product.inside(UNARY)}"
        if e.constant:
            text += f" {'-' if e.constant < 0 else '+'} {abs(e.constant)}"
        single = len(e.terms) == 1 and not e.constant and e.terms[0][1] > 0
        return Value(text, PRODUCT if single else SUM, deps, index=e)

    def product(self, monomial: Sequence[IndexExpr], factor: int) -> Value:
        # Block variables first: they have the type that is wide enough for the product.
        parts = sorted((self.index(atom) for atom in monomial), key=lambda v: not v.deps)
        texts = [p.inside(ATOM if len(parts) > 1 or factor != 1 else PRODUCT) for p in parts]
        if self.wide and not parts[0].deps and len(parts) > 1:
            texts[0] = f"tl.cast({parts[0].text}, tl.int64)"
        if factor != 1:
            texts.append(str(factor))
        level = PRODUCT if len(texts) > 1 else parts[0].level
        return Value(" * ".join(texts), level, frozenset().union(*(p.deps for p in parts)))
