"""Writes the values of a program as Triton text, each once and where its indices are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from terrazzo.base.scalar import (
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
from terrazzo.base.shapes import contiguous_strides, num_elements, unflatten
from terrazzo.codegen.triton.lines import (
    NO_DEPS,
    NO_GUARD,
    Block,
    Deps,
    Guard,
    Lines,
    Names,
    Value,
)
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
from terrazzo.dtypes import (
    DType,
    bfloat16,
    bool_,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    int64,
)
from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.ir import Tensor, substitute_any
from terrazzo.index import Index, IndexExpr, Var, free_vars, proves_le, proves_lt

_TO_FLOAT8 = {float8_e4m3fn: "_e4m3", float8_e5m2: "_e5m2"}
LONG, SHORT = 72, 24  # characters of a term that is better given a name; as a part of an address


class Emitter(Lines):
    """Builds the body of one kernel."""

    def __init__(self, names: Names, dims: Mapping[Var, str], pointers: Mapping[Tensor, str],
                 make_space: Callable[[Index, str], Block], *, tile: bool, wide: bool,
                 libdevice: bool):
        super().__init__(names, dims, tile=tile, wide=wide)
        self.pointers, self.make_space, self.libdevice = pointers, make_space, libdevice
        self.row: Block | None = None
        self.spaces: dict[Index, Block] = {}
        self.uses: dict[int, int] = {}
        self.misses: dict[int, bool] = {}
        self.keep: list[Scalar] = []  # what the ids in these tables belong to
        # "bf16" or "f16" where all results are that narrow, so that they need no more digits.
        self.narrow = narrow_type(pointers) if libdevice else ""

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
        inside = gelu_argument(node) if self.narrow else None
        if inside is not None:  # the error function alone takes longer than the memory it is for
            value = self.typed(self.value(inside, guard), inside.dtype)
            return Value(f"_gelu_{self.narrow}({value.text})", ATOM, value.deps, node.dtype)
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
        fixed = alone and not any(a.deps for a in operands)  # Triton would compute it in Python
        result = list(args)
        for i, (arg, child) in enumerate(zip(args, node.args)):
            if arg.index is not None:
                if row.level != COMPARE or (fixed and arg is operands[0]):
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
            opposite = replace(chosen, text=f"~{chosen.text}")
            return [chosen, self.value(yes, Guard((*guard.conditions, chosen))),
                    self.value(no, Guard((*guard.conditions, opposite)))]
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
        if node.dtype in _TO_FLOAT8 and inner.dtype.is_float and inner.dtype.bits > 8:
            text = f"{_TO_FLOAT8[node.dtype]}({value.text})"
        return Value(text, ATOM, value.deps, node.dtype)

    # ------------------------------------------------------------ memory
    def may_miss(self, node: Scalar) -> bool:
        """Whether a value contains a load that is not provably inside its tensor."""
        if id(node) not in self.misses:
            self.misses[id(node)] = any(isinstance(n, Load) and not self.in_range(n)
                                        for n in walk(node))
        return self.misses[id(node)]

    def in_range(self, load: Load) -> bool:
        """Whether every index of a load is provably inside its dimension."""
        for i, size in zip(load.indices, load.source.shape):
            if isinstance(i, Scalar):
                return False
            if i in self.axes and proves_le(self.axes[i].extent, size):
                continue
            if not (proves_le(0, i) and proves_lt(i, size)):
                return False
        return True

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
            elif i.dtype.bits < 64 and self.wide:
                value = Value(f"{value.inside(ATOM)}.to(tl.int64)", ATOM, value.deps, int64)
            if len(value.text) > SHORT:
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
            if self.is_block({var}):
                text += f" + {self.variable(var).text} * 0"
        return text

    def inside(self, deps: Deps, guard: Guard) -> str:
        """The mask of a load: the lanes that exist, and the conditions around it."""
        mask = self.mask(deps)
        lanes = [mask.text] if mask else []
        lanes += [c.text for c in guard.conditions if self.is_block(c.deps)]
        single = [c.text for c in guard.conditions if not self.is_block(c.deps)]
        if not single or not self.is_block(deps):
            return " & ".join(lanes + single)
        # A single condition for all lanes: Triton's interpreter cannot spread it with `&`.
        if not lanes:
            var = next(v for v in sorted(deps, key=lambda v: v.name) if self.is_block({v}))
            lanes = [f"{self.variable(var).text} >= 0"]
        return f"tl.where({' & '.join(single)}, {' & '.join(lanes)}, False)"

    def load(self, node: Load, guard: Guard, widen: DType | None = None) -> Value:
        source: Tensor = node.source
        if source.body is not None:
            return self.stage_value(source, node.indices, guard)
        size = num_elements(source.shape)
        if isinstance(size, int) and size == 0:  # nothing to read, and no lane that needs it
            return _literal(0, widen or node.dtype)
        address = self.address(source, node.indices, guard)
        deps = address.deps | guard.deps
        inside = self.inside(deps, guard)
        masked = f", mask={inside}" if inside else ""
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
            self.axes.update((table[a.var], a) for a in node.axes)
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
def narrow_type(pointers: Iterable[Tensor]) -> str:
    """The half type of all results; empty if one of them is something else."""
    types = {t.dtype for t in pointers if t.body is not None}
    return types.pop().short if len(types) == 1 and types <= {float16, bfloat16} else ""


def gelu_argument(node: Call) -> Scalar | None:
    """The x of `0.5 * x * (1 + erf(x / sqrt(2)))`, which is how all GELUs are written by now."""
    if node.op != "mul" or node.dtype is not float32:
        return None
    half, gate = node.args
    if not (isinstance(half, Call) and half.op == "mul" and _is(half.args[0], 0.5)
            and isinstance(gate, Call) and gate.op == "add" and _is(gate.args[0], 1.0)):
        return None
    curve = gate.args[1]
    inside = curve.args[0] if isinstance(curve, Call) and curve.op == "erf" else None
    x = half.args[1]
    if not (isinstance(inside, Call) and inside.op == "mul" and inside.args[1] is x
            and _is(inside.args[0], math.sqrt(0.5))):
        return None
    return x


def _is(node: Scalar, value: float) -> bool:
    return isinstance(node, Const) and abs(float(node.value) - value) < 1e-7


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
