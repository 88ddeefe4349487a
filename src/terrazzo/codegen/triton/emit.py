"""Writes the values of a program as lines of Triton, each once and where its indices are known.

A kernel has two kinds of index: the *row*, which its program instance decides, and a *position*
inside a row, which is a block of numbers (`Space`), at once or in a loop. Every text knows the
indices it depends on. That settles three things by itself: the mask a load needs, the scope a line
belongs to (what does not change in a loop lands before it), and how tiles broadcast.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from terrazzo.codegen.triton.spelling import (
    ATOM,
    COMPARE,
    PRODUCT,
    SUM,
    UNARY,
    Spelling,
    keeps_type,
    literal_text,
    spelling,
    type_text,
)
from terrazzo.dtypes import DType, bool_, int64
from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.ir import Tensor, substitute_any
from terrazzo.index import (
    FloorDiv,
    Index,
    IndexExpr,
    Max,
    Min,
    Mod,
    Sum,
    Var,
    bounds,
    free_vars,
    proves_le,
    proves_lt,
)
from terrazzo.scalar import (
    REDUCTIONS,
    Call,
    Const,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    children,
    substitute_indices,
    walk,
)
from terrazzo.shapes import contiguous_strides, num_elements

WIDTH = 100
LONG, SHORT = 72, 24  # characters of a term that is better given a name; as a part of an address

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

    texts: tuple[str, ...] = ()
    deps: Deps = NO_DEPS


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


class Emitter:
    """Builds the body of one kernel."""

    def __init__(self, names: Names, dims: Mapping[Var, str], pointers: Mapping[Tensor, str],
                 make_space: Callable[[Index, str], Block], *, tile: bool, wide: bool,
                 libdevice: bool):
        self.names, self.dims, self.pointers = names, dims, pointers
        self.make_space = make_space
        self.tile, self.wide, self.libdevice = tile, wide, libdevice
        self.blocks: dict[Var, Block] = {}
        self.row: Block | None = None
        self.spaces: dict[Index, Block] = {}
        self.axis_names: dict[Index, str] = {}
        self.scopes = [Scope(set())]
        self.uses: dict[int, int] = {}
        self.misses: dict[int, bool] = {}
        self.keep: list[Scalar] = []  # what the ids in these tables belong to

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
        if e in self.axis_names:
            value = self.bind(self.index_text(e), self.axis_names[e])
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

    # ------------------------------------------------------------ values
    def typed(self, value: Value, dtype: DType) -> Value:
        """A number or an index with its type spelled out."""
        if value.literal:
            return Value(f"tl.full((), {value.text}, {type_text(dtype)})", dtype=dtype)
        if value.index is None:
            return value
        if not isinstance(value.index, IndexExpr):
            return Value(f"tl.full((), {value.text}, {type_text(dtype)})", dtype=dtype)
        if dtype is int64 and self.wide and value.deps:
            return replace(value, index=None, dtype=dtype)
        if not value.deps:  # an argument that is 1 is a constant to Triton and has no .to
            return Value(f"tl.cast({value.text}, {type_text(dtype)})", dtype=dtype)
        return Value(f"{value.inside(ATOM)}.to({type_text(dtype)})", ATOM, value.deps, dtype)

    def root(self, tree: Scalar, guard: Guard = NO_GUARD) -> Value:
        """The value of a whole expression."""
        self.keep.append(tree)
        for node in walk(tree):
            for child in children(node):
                self.uses[id(child)] = self.uses.get(id(child), 0) + 1
        return self.value(tree, guard)

    def value(self, node: Scalar, guard: Guard) -> Value:
        if isinstance(node, Const):
            return _literal(node.value, node.dtype)
        if isinstance(node, FromIndex):
            return replace(self.index(node.index), dtype=node.dtype)
        guard = guard if self.may_miss(node) else NO_GUARD
        key = (id(node), guard)
        known = self.recall(key)
        if known is not None:
            return known
        if isinstance(node, Load):
            result = self.load(node, guard)
        elif isinstance(node, Reduce):
            result = self.reduce(node, guard)
        else:
            assert isinstance(node, Call)
            result = self.cast(node, guard) if node.op == "cast" else self.call(node, guard)
        shared = self.uses.get(id(node), 0) > 1
        if (shared or len(result.text) > LONG) and not result.literal:
            hint = _REDUCED[node.op] if isinstance(node, Reduce) else "t"
            result = self.bind(result, hint)
        return self.remember(key, result)

    def call(self, node: Call, guard: Guard) -> Value:
        row = spelling(node, self.libdevice)
        if node.op == "where":
            args = self.where_arguments(node, guard)
        else:
            args = [self.value(a, guard) for a in node.args]
        args = self.with_types(node, row, args)
        texts = []
        for i, arg in enumerate(args):
            if row.text.count(f"{{{i}}}") > 1:
                arg = self.bind(arg, "t")
            texts.append(arg.inside(_least(row, i)))
        text = row.text.format(*texts, type=type_text(node.dtype), bits=node.dtype.bits)
        level = args[0].level if row.text == "{0}" else row.level
        return Value(text, level, frozenset().union(*(a.deps for a in args)), node.dtype)

    def with_types(self, node: Call, row: Spelling, args: list[Value]) -> list[Value]:
        """Arguments with their types spelled out where Triton would guess others."""
        operands = args[1:] if node.op == "where" else args
        alone = all(a.literal or a.index is not None for a in operands)
        result = list(args)
        for i, (arg, child) in enumerate(zip(args, node.args)):
            if arg.index is not None:
                if row.level != COMPARE:
                    result[i] = self.typed(arg, child.dtype)
            elif arg.literal:
                first = alone and arg is operands[0]
                function = row.level == ATOM and node.op != "where"
                fits = row.literals and not (function and not keeps_type(arg.text, child.dtype))
                if first or not fits or (node.op == "where" and i == 0):
                    result[i] = self.typed(arg, child.dtype)
        return result

    def where_arguments(self, node: Call, guard: Guard) -> list[Value]:
        """The condition and both branches, whose loads happen only where they are chosen."""
        condition, yes, no = node.args
        chosen = self.value(condition, guard)
        if condition.dtype is not bool_:
            chosen = Value(f"{chosen.inside(SUM)} != 0", COMPARE, chosen.deps, bool_)
        if not chosen.literal and any(self.may_miss(branch) for branch in (yes, no)):
            chosen = self.bind(chosen, "inside")
            deps = guard.deps | chosen.deps
            return [chosen, self.value(yes, Guard((*guard.texts, chosen.text), deps)),
                    self.value(no, Guard((*guard.texts, f"~{chosen.text}"), deps))]
        return [chosen, self.value(yes, guard), self.value(no, guard)]

    def cast(self, node: Call, guard: Guard) -> Value:
        (inner,) = node.args
        if isinstance(inner, Load) and inner.source in self.pointers and (
                inner.source.body is None and inner.dtype.compute is node.dtype):
            return self.load(inner, guard, node.dtype)
        if isinstance(inner, Const):
            return _literal(np.asarray(inner.value).astype(inner.dtype.np), node.dtype)
        value = self.value(inner, guard)
        if isinstance(value.index, int):
            return _literal(value.index, node.dtype)
        if value.literal:
            value = self.typed(value, inner.dtype)
        if value.index is not None:
            return self.typed(value, node.dtype)
        text = f"{value.inside(ATOM)}.to({type_text(node.dtype)})"
        return Value(text, ATOM, value.deps, node.dtype)

    # ------------------------------------------------------------ memory
    def may_miss(self, node: Scalar) -> bool:
        """Whether a value contains a load that is not provably inside its tensor."""
        if id(node) not in self.misses:
            self.misses[id(node)] = any(isinstance(n, Load) and not _in_range(n)
                                        for n in walk(node))
        return self.misses[id(node)]

    def address(self, source: Tensor, indices: Sequence[Index | Scalar], guard: Guard) -> Value:
        """`Tensor.flat`, with computed indices beside the affine part instead of around it."""
        strides = source.strides or contiguous_strides(source.shape)
        flat: Index = 0
        texts, deps = [], NO_DEPS
        for i, stride in zip(indices, strides):
            if not isinstance(i, Scalar):
                flat = flat + i * stride
                continue
            value = self.value(i, guard)
            if value.literal or value.index is not None:
                value = self.typed(value, int64)
            elif len(value.text) > SHORT:
                value = self.bind(value, "index")
            step = self.index(stride)
            texts.append(value.inside(SUM) if step.text == "1" else
                         f"{value.inside(PRODUCT)} * {step.inside(ATOM)}")
            deps |= value.deps | step.deps
        if texts and not isinstance(flat, IndexExpr) and flat == 0:
            return Value(" + ".join(texts), SUM, deps)
        plain = self.index(flat)
        return Value(" + ".join([plain.inside(SUM), *texts]), SUM, deps | plain.deps)

    def place(self, pointer: str, address: Value, needed: Deps) -> str:
        """A pointer to an element, or to a block of them when `needed` asks for one."""
        text = pointer if address.text == "0" else f"{pointer} + {address.inside(SUM)}"
        for var in sorted(needed - address.deps, key=lambda v: v.name):
            if self.blocks[var].size:
                text += f" + {self.variable(var).text} * 0"
        return text

    def load(self, node: Load, guard: Guard, widen: DType | None = None) -> Value:
        source: Tensor = node.source
        if source.body is not None:
            return self.stage_value(source, node.indices, guard)
        size = num_elements(source.shape)
        if isinstance(size, int) and size == 0:  # nothing to read, and no lane that needs it
            return _literal(0, widen or node.dtype)
        address = self.address(source, node.indices, guard)
        deps = address.deps | guard.deps
        mask = self.mask(deps)
        conditions = [*([mask.text] if mask else []), *guard.texts]
        masked = f", mask={' & '.join(conditions)}" if conditions else ""
        text = f"tl.load({self.place(self.pointers[source], address, deps)}{masked})"
        if widen is not None:
            text += f".to({type_text(widen)})"
        return self.bind(Value(text, ATOM, deps, widen or node.dtype), source.name)

    def store(self, stage: Tensor, axes: Sequence[Index], value: Value) -> None:
        """Write elements of an output."""
        value = self.typed(value, stage.dtype)
        address = self.address(stage, axes, NO_GUARD)
        mask = self.mask(address.deps)
        masked = f", mask={mask.text}" if mask else ""
        pointer = self.place(self.pointers[stage], address, NO_DEPS)
        comment = stage.origin if value.text.isidentifier() and value.text != stage.name else ""
        self.line(f"tl.store({pointer}, {value.text}{masked})", address.deps | value.deps, comment)

    # ------------------------------------------------------------ stages
    def stage_value(self, stage: Tensor, indices: Sequence[Index | Scalar],
                    guard: Guard = NO_GUARD) -> Value:
        """An element of a tensor of this kernel, computed here; the same one is computed once."""
        key = ("stage", stage, guard, *(
            id(i) if isinstance(i, Scalar) else i for i in indices))
        known = self.recall(key)
        if known is not None:
            return known
        assert stage.body is not None
        self.keep += [i for i in indices if isinstance(i, Scalar)]
        tree = substitute_any(stage.body, {a.var: i for a, i in zip(stage.axes, indices)})
        tree = tree if tree.dtype is stage.dtype else Call(stage.dtype, "cast", (tree,))
        value = self.root(tree, guard)
        if not value.literal:
            value = self.typed(value, stage.dtype)
            value = self.bind(value, stage.name, stage.origin)
        return self.remember(key, value)

    def space(self, extent: Index, name: str) -> Block:
        """The positions `0 <= p < extent` inside a row; `name` is for one not seen before."""
        if extent not in self.spaces:
            self.spaces[extent] = self.make_space(extent, name)
            self.add_block(self.spaces[extent])
        return self.spaces[extent]

    def reduce(self, node: Reduce, guard: Guard) -> Value:
        """All positions of a row combined: lane by lane in a loop, then across lanes."""
        positions = {block.var for block in self.spaces.values()}
        if _index_vars(node.value) & positions:
            raise UnsupportedOperator("a reduction inside another has no Triton source",
                                      hint="compute the inner one in a kernel of its own")
        extents = _extents(node)
        block = self.space(num_elements(extents), node.axes[0].var.name)
        table = {a.var: a.lo + at for a, at in zip(node.axes, unflatten(block.var, extents))}
        if len(table) > 1:
            self.axis_names.update((at, var.name) for var, at in table.items())
        identity = literal_text(_identity(node), node.dtype)
        with self.row_level():
            lanes = ""
            if block.looped:
                lanes = self.names.fresh(f"{_REDUCED[node.op]}_lanes")
                shape = f"{block.size}, {self.row.size}" if self.tile and self.row else block.size
                type_ = type_text(node.dtype)
                self.line(f"{lanes} = tl.full([{shape}], {identity}, {type_})", NO_DEPS)
            with self.position(block):
                value = self.root(substitute_indices(node.value, table), guard)
                here = frozenset((block.var,))
                mask = self.mask(here)
                if len(value.text) > LONG // 2:
                    value = self.bind(value, "t")
                if mask is None and block.var not in value.deps:  # all lanes hold the same
                    mask = Value(f"{self.variable(block.var).text} >= 0")
                part = Value(value.text if mask is None else
                             f"tl.where({mask.text}, {value.text}, {identity})",
                             deps=value.deps | here)
                if lanes:
                    self.line(_combined(node, lanes, part.text), part.deps)
        text = _across_lanes(node, lanes or part.text, self.tile)
        return Value(text, ATOM, part.deps - here, node.dtype)


# ---------------------------------------------------------------- helpers
_REDUCED = {"add": "sum", "mul": "prod", "max": "max", "min": "min", "and": "all", "or": "any"}


def _literal(value: object, dtype: DType) -> Value:
    text = literal_text(value, dtype)
    return Value(text, UNARY if text.startswith("-") else ATOM, NO_DEPS, dtype, literal=True)


def _least(row: Spelling, i: int) -> int:
    """How tightly the text of argument `i` must bind where a spelling puts it."""
    place = row.text.index(f"{{{i}}}")
    before, after = row.text[:place], row.text[place + 3:]
    if (before.endswith(("(", ", ")) and after[:1] in (")", ",")) or row.text == "{0}":
        return COMPARE
    if row.level in (ATOM, UNARY):
        return ATOM
    if not before and row.level != COMPARE:
        return row.level
    return row.level + 1


def _in_range(load: Load) -> bool:
    return all(not isinstance(i, Scalar) and proves_le(0, i) and proves_lt(i, size)
               for i, size in zip(load.indices, load.source.shape))


def _identity(node: Reduce) -> object:
    if node.op == "and" and node.dtype.kind == "u":
        return node.dtype.max
    return REDUCTIONS[node.op].identity(node.dtype)


def _index_vars(root: Scalar) -> set[Var]:
    """The index variables a value depends on."""
    found: set[Var] = set()
    for node in walk(root):
        if isinstance(node, FromIndex):
            found |= free_vars(node.index)
        elif isinstance(node, Load):
            found = found.union(*(free_vars(i) for i in node.indices
                                  if not isinstance(i, Scalar)))
    return found


def _combined(node: Reduce, lanes: str, value: str) -> str:
    sign = {"add": "+=", "mul": "*=", "and": "&=", "or": "|="}.get(node.op)
    if sign is not None:
        return f"{lanes} {sign} {value}"
    function = f"_{node.op}" if node.dtype.is_float else f"tl.{node.op}imum"
    return f"{lanes} = {function}({lanes}, {value})"


def _across_lanes(node: Reduce, text: str, tile: bool) -> str:
    keep = ", keep_dims=True" if tile else ""
    if node.op == "add" or (node.op in ("max", "min") and node.dtype.is_integer):
        # Triton combines narrow integers as 32-bit ones.
        narrow = f".to({type_text(node.dtype)})" if node.dtype.bits < 32 else ""
        return f"tl.{_REDUCED[node.op]}({text}, axis=0{keep}){narrow}"
    return f"tl.reduce({text}, 0, _{node.op}{keep})"


def _extents(node: Reduce) -> list[Index]:
    own = {a.var for a in node.axes}
    if any((free_vars(a.lo) | free_vars(a.hi)) & own for a in node.axes):
        raise UnsupportedOperator(
            "a reduction over a range that depends on another of its axes has no Triton source",
            hint="reduce over the whole range, with where(inside, value, identity)")
    return [a.extent for a in node.axes]


def unflatten(flat: Index, extents: Sequence[Index]) -> list[Index]:
    """The index along each axis of the element that is `flat`-th in row-major order."""
    result: list[Index] = []
    for d, extent in enumerate(extents):
        inner = num_elements(extents[d + 1:])
        if any(isinstance(n, int) and n == 0 for n in (extent, inner)):
            result.append(0)
        else:
            result.append(flat // inner if d == 0 else flat // inner % extent)
    return result
