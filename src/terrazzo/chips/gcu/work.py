"""What a kernel computes: cycles of the vector, matrix and scalar units, bytes of the scratchpad.

| what | counts |
|---|---|
| an operation in a vector loop | its cost (scalar_table.py) times elements / lanes of the type |
| a product that is only added to something | nothing beside the addition: one FMA |
| a vector loop that reduces into one place | log2(lanes) more operations |
| what stays the same in a vector loop | its cost, once, in scalar cycles |
| a product of tiles | products / (rows * columns * depth of the type) cycles of the matrix unit |
| what the matrix unit reads and sums up | nothing more: it has ports of its own |
| a statement outside of vector loops | 1 + costs, in scalar cycles |
| an iteration of a loop, a branch | 1 scalar cycle, but nothing where a unit steers itself |
| a load or store | bytes of the scratchpad; in a vector loop once if its place stays the same |

Loops over vector loops, over tiles and over copies are steered by the unit that runs them, with
branches on sizes as masks. A vector loop right inside of such loops runs over all their elements
as one, if each has a place of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Scalar
from terrazzo.base.scalar import loads as loads_of
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.base.scalar_table import OPS, REDUCTIONS
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.tally import (
    ALWAYS,
    LOCAL,
    MATRIX,
    SCALAR,
    VECTOR,
    Sides,
    Tally,
    as_index,
    is_unit,
    trips,
    when,
)
from terrazzo.dtypes import DType
from terrazzo.index import Index, IndexExpr, Var, ceildiv, free_vars
from terrazzo.loop.ir import (
    Alloc,
    Atomic,
    Block,
    For,
    If,
    Let,
    Stmt,
    Store,
    Tile,
    While,
    children,
    roots_of,
    substitute_vars,
    walk,
)

FREE = ("cast", "bitcast")  # conversions happen on the way from and to memory


@dataclass
class Places:
    """Where counts are written that are not known further outside, by the statement around them."""

    tasks: frozenset[int] = frozenset()  # loops whose iterations are apart from what is around
    once: frozenset[int] = frozenset()  # statements that run once a task: no loop is around them
    waiting: frozenset[int] = frozenset()  # in loops that wait: who knows for how many turns
    inside: dict[tuple[int, int], Tally] = field(default_factory=dict)

    def add(self, stmt: Stmt, tally: Tally, branch: int = 0) -> None:
        """Count in the body of a statement, or in one of its branches."""
        if tally.terms and id(stmt) not in self.waiting:
            self.inside.setdefault((id(stmt), branch), Tally()).include(tally)

    def leave(self, stmt: Stmt, tally: Tally) -> Tally:
        """What is known outside of a statement of what its body counts; the rest stays in it."""
        if isinstance(stmt, For):
            if id(stmt) in self.tasks:
                self.add(stmt, tally)
                return Tally()
            if is_unit(stmt):
                return self._unnamed(stmt, tally, stmt.lo)
            closed, rest = tally.over(stmt)
        elif isinstance(stmt, Let):
            return self._unnamed(stmt, tally, as_index(stmt.value))
        else:
            assert isinstance(stmt, While)
            closed, rest = Tally(), tally
        self.add(stmt, rest)
        return closed

    def _unnamed(self, stmt: For | Let, tally: Tally, value: Index | None) -> Tally:
        """Where a name is known: what it stands for is put in only to get out of loops."""
        if value is not None and id(stmt) not in self.once:
            return tally.where({stmt.var: value})
        closed, rest = tally.without(stmt.var)
        self.add(stmt, rest)
        return closed

    def choose(self, stmt: If, then: Tally, orelse: Tally) -> Tally:
        """What is known outside of a branch."""
        made, sides = Tally(), sides_of(stmt)
        if sides is None:
            self.add(stmt, then)
            self.add(stmt, orelse, 1)
        else:
            made.include(then, sides[0])
            made.include(orelse, sides[1])
        return made


def sides_of(stmt: If) -> Sides | None:
    """Where each side of a branch runs; None where data decides it.

    A single atomic operation under a mask is no branch: lanes that are masked off take their time.
    """
    found = when(stmt.cond)
    inner = stmt.then
    while isinstance(inner, Let):
        inner = inner.body
    masked = found is None and isinstance(inner, Atomic) and stmt.orelse is None
    return (ALWAYS, ()) if masked else found


def work(stmt: Stmt, chip: Description, places: Places) -> Tally:
    """All that a statement computes."""
    return unwind(_work(stmt, chip, places))


def _work(stmt: Stmt, chip: Description, places: Places) -> Walk[Tally]:
    made = Tally()
    if isinstance(stmt, Block):
        for inner in stmt.stmts:
            made.include((yield _work(inner, chip, places)))
    elif isinstance(stmt, Alloc):
        made = yield _work(stmt.body, chip, places)
    elif isinstance(stmt, For) and (whole := _flattened(stmt)) is not None:
        _vector_loop(whole, chip, made)
    elif isinstance(stmt, (For, While)):
        inner = yield _work(stmt.body, chip, places)
        if isinstance(stmt, While) or (
                stmt.kind == "serial" and not is_unit(stmt) and not _is_steered(stmt.body)):
            inner.add(SCALAR, 1)
        if isinstance(stmt, While):
            _statement(stmt, chip, inner)
        made = places.leave(stmt, inner)
    elif isinstance(stmt, Let):
        made = places.leave(stmt, (yield _work(stmt.body, chip, places)))
        _statement(stmt, chip, made)
    elif isinstance(stmt, If):
        then = yield _work(stmt.then, chip, places)
        orelse = Tally()
        if stmt.orelse is not None:
            orelse = yield _work(stmt.orelse, chip, places)
        made = places.choose(stmt, then, orelse)
        if not _is_steered(stmt):
            made.add(SCALAR, 1)
            _statement(stmt, chip, made)
    elif isinstance(stmt, Tile):
        yield _tile(stmt, chip, places, made)
    elif isinstance(stmt, Store) and _is_copy(stmt):
        made.add(LOCAL, stmt.buffer.dtype.itemsize * (2 if loads_of(stmt.value) else 1))
    else:
        made.add(SCALAR, 1)
        _statement(stmt, chip, made)
    return made


def _is_steered(stmt: Stmt) -> bool:
    """Whether a statement is of vector loops, tiles and copies alone."""
    if isinstance(stmt, (Block, Alloc)) or (isinstance(stmt, For) and stmt.kind != "vector") or (
            isinstance(stmt, If) and when(stmt.cond) is not None):
        return all(map(_is_steered, children(stmt)))
    return isinstance(stmt, (For, Tile)) or (isinstance(stmt, Store) and _is_copy(stmt))


def _is_copy(stmt: Store) -> bool:
    """Whether a statement copies, or fills memory, at places that no data decides."""
    value: Scalar = stmt.value
    while isinstance(value, Call) and value.op in FREE:
        value = value.args[0]
    plain = isinstance(value, Const) or (
        isinstance(value, Load) and not isinstance(value.indices[0], Scalar))
    return plain and stmt.reduce is None and stmt.mask is None and not isinstance(
        stmt.index, Scalar)


def _flattened(loop: For) -> For | None:
    """A vector loop, or loops around one, as the vector loop over all elements of them.

    Only the number of its iterations and what its places hang on are of interest, so all variables
    of the nest become one.
    """
    around: list[For] = []
    inner: Stmt = loop
    while isinstance(inner, For) and inner.kind == "serial":
        around.append(inner)
        inner = inner.body
    if not isinstance(inner, For) or inner.kind != "vector":
        return None
    if not around:
        return inner
    names = {outer.var for outer in around}
    if any(_hangs(i, names) for f in (*around, inner) for i in (f.lo, f.hi)):
        return None
    stmts = inner.body.stmts if isinstance(inner.body, Block) else (inner.body,)
    if not all(isinstance(s, Store) and s.reduce is None and not isinstance(s.index, Scalar)
               and all(_hangs(s.index, {v}) for v in (*names, inner.var)) for s in stmts):
        return None
    count = trips(inner)
    for outer in around:
        count = count * trips(outer)
    return replace(inner, lo=0, hi=count, body=substitute_vars(inner.body, {
        var: inner.var for var in names}))


def _hangs(index: Index, names: set[Var]) -> bool:
    return isinstance(index, IndexExpr) and not names.isdisjoint(free_vars(index))


# ---------------------------------------------------------------- scalar statements
def _statement(stmt: Stmt, chip: Description, made: Tally) -> None:
    """A statement on single values."""
    cost, size = 0, 0
    for root in _values(stmt):
        for node in walk_scalar(root):
            if isinstance(node, Call) and node.op not in FREE:
                cost += OPS[node.op].cost
            elif isinstance(node, Load):
                size += node.dtype.itemsize
    if isinstance(stmt, (Store, Atomic)):
        cost += 1 if isinstance(stmt, Atomic) or stmt.reduce else 0
        size += stmt.buffer.dtype.itemsize
    made.add(SCALAR, cost)
    made.add(LOCAL, size)


def _values(stmt: Stmt) -> list[Scalar]:
    """What a statement computes; where a store may bypass caches is no matter of this chip."""
    plain = replace(stmt, streaming=False) if isinstance(stmt, Store) else stmt
    return [root for root in roots_of(plain) if isinstance(root, Scalar)]


# ---------------------------------------------------------------- vector loops
@dataclass
class _Lanes:
    """The values of one vector loop, each numbered once: equal ones are computed once."""

    var: Var
    count: Index
    chip: Description
    made: Tally
    numbers: dict[object, int] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)

    def charge(self, dtype: DType, cost: int, varies: bool, times: Index = 1) -> None:
        """Count an operation."""
        if varies:
            lanes = self.chip.lanes(max(dtype.bits, 8))
            self.made.add(VECTOR, ceildiv(self.count, lanes) * cost * times)
        else:
            self.made.add(SCALAR, times * cost)

    def moved(self, dtype: DType, varies: bool, times: Index = 1) -> None:
        """Count a load or a store."""
        self.made.add(LOCAL, (self.count if varies else 1) * dtype.itemsize * times)

    def varies(self, index: Index | Scalar, known: dict[int, int]) -> bool:
        """Whether an address is another one for each lane."""
        if isinstance(index, Scalar):
            return known[id(index)] in self.varying
        return isinstance(index, IndexExpr) and self.var in free_vars(index)


def _vector_loop(loop: For, chip: Description, made: Tally) -> None:
    """All lanes run all statements: branches are masks in here."""
    lanes = _Lanes(loop.var, trips(loop), chip, made)
    todo: list[tuple[Stmt, Index]] = [(loop.body, 1)]
    while todo:
        node, times = todo.pop()
        if isinstance(node, For):
            times = times * trips(node)
        known = _number(node, lanes, times)
        if isinstance(node, Store):
            varies = lanes.varies(node.index, known)
            lanes.moved(node.buffer.dtype, varies, times)
            if node.reduce:
                _reduction(node, lanes, varies, known, times)
        todo += [(child, times) for child in reversed(children(node))]


def _reduction(store: Store, lanes: _Lanes, varies: bool, known: dict[int, int], times: Index
               ) -> None:
    assert store.reduce is not None
    row, dtype = OPS[REDUCTIONS[store.reduce].op], store.buffer.dtype
    deep = known[id(store.value)] in lanes.varying
    lanes.charge(dtype, row.cost, varies or deep, times)
    if deep and not varies:
        width = lanes.chip.lanes(dtype.bits)
        lanes.made.add(VECTOR, times * (width.bit_length() - 1) * row.cost)


def _number(stmt: Stmt, lanes: _Lanes, times: Index) -> dict[int, int]:
    """Number the values of a statement, and charge those that are new."""
    known: dict[int, int] = {}
    fused = _fused(stmt)
    for root in _values(stmt):
        for node in walk_scalar(root):
            if id(node) in known:
                continue
            key, varies = _identity(node, known, lanes)
            number = lanes.numbers.get(key)
            known[id(node)] = len(lanes.numbers) if number is None else number
            if number is not None:
                continue
            lanes.numbers[key] = known[id(node)]
            if varies:
                lanes.varying.add(known[id(node)])
            if isinstance(node, Load):
                lanes.moved(node.dtype, varies, times)
            elif isinstance(node, Call) and node.op not in FREE and id(node) not in fused:
                widest = max((node, *node.args), key=lambda n: n.dtype.bits)
                lanes.charge(widest.dtype, OPS[node.op].cost, varies, times)
    return known


def _identity(node: Scalar, known: dict[int, int], lanes: _Lanes) -> tuple[object, bool]:
    """What makes a value this one, and whether it is another one for each lane."""
    if isinstance(node, Call):
        args = tuple(known[id(a)] for a in node.args)
        return (node.op, node.dtype.name, args), not lanes.varying.isdisjoint(args)
    if isinstance(node, Load):
        index = node.indices[0]
        place = known[id(index)] if isinstance(index, Scalar) else index
        return (Load, id(node.source), isinstance(index, Scalar), place), lanes.varies(
            index, known)
    if isinstance(node, FromIndex):
        return (FromIndex, node.dtype.name, node.index), lanes.varies(node.index, known)
    if isinstance(node, Const):
        return (Const, node.dtype.name, repr(node.value)), False
    return id(node), False


def _fused(stmt: Stmt) -> set[int]:
    """The products that are only added to something."""
    uses: dict[int, int] = {}
    sums: list[Scalar] = []
    for root in _values(stmt):
        uses[id(root)] = uses.get(id(root), 0) + 1
        for node in walk_scalar(root):
            if isinstance(node, Call):
                for arg in node.args:
                    uses[id(arg)] = uses.get(id(arg), 0) + 1
                if node.op in ("add", "sub"):
                    sums += _first_product(node.args)
    if isinstance(stmt, Store) and stmt.reduce == "add":
        sums += _first_product((stmt.value,))
    return {id(node) for node in sums if uses[id(node)] == 1}


def _first_product(args: tuple[Scalar, ...]) -> list[Call]:
    return [a for a in args if isinstance(a, Call) and a.op == "mul" and a.dtype.is_float][:1]


# ---------------------------------------------------------------- tiles
def _tile(tile: Tile, chip: Description, places: Places, made: Tally) -> Walk[None]:
    """What a tile means: sums of products go to the matrix unit, the rest is loops."""
    meaning = tile.expand()
    products: list[tuple[Index, DType]] = []

    def visit(stmt: Stmt, times: Index, around: Var | None) -> Stmt | None:
        """The statement without its products of matrices."""
        if isinstance(stmt, Block):
            return Block(tuple(s for s in (visit(s, times, around) for s in stmt.stmts) if s))
        if isinstance(stmt, For):
            var = stmt.var if stmt.kind == "vector" else around
            body = visit(stmt.body, times * trips(stmt), var)
            return None if body is None else replace(stmt, body=body)
        if isinstance(stmt, Alloc):
            body = visit(stmt.body, times, around)
            return None if body is None else replace(stmt, body=body)
        if isinstance(stmt, Store) and (dtype := _of_matrices(stmt, around, chip)) is not None:
            products.append((times, dtype))
            return None
        return stmt

    rest = visit(meaning, 1, None)
    for count, dtype in products:
        _product(count, dtype, chip, made)
    only_cleared = products and all(isinstance(s.value, Const) for s in walk(rest or meaning)
                                    if isinstance(s, Store))
    if rest is not None and not only_cleared:
        made.include((yield _work(rest, chip, Places())))


def _of_matrices(store: Store, along: Var | None, chip: Description) -> DType | None:
    """The type that a product of matrices multiplies, if a statement adds one up."""
    value = store.value
    if store.reduce != "add" or not isinstance(value, Call) or value.op != "mul" or along is None:
        return None
    operands = [_loaded(a) for a in value.args]
    if operands[0] is None or operands[1] is None:
        return None
    everywhere = all(_along(place, along) for place in (
        store.index, operands[0].indices[0], operands[1].indices[0]))
    wide = max((o.dtype for o in operands if o is not None), key=lambda t: t.bits)
    name = "i8" if wide.is_integer and wide.bits <= 8 else wide.short
    return None if everywhere or chip.depth(name) is None else wide


def _loaded(value: Scalar) -> Load | None:
    while isinstance(value, Call) and value.op == "cast":
        value = value.args[0]
    return value if isinstance(value, Load) else None


def _along(index: Index | Scalar, var: Var) -> bool:
    if isinstance(index, Scalar):
        return any(isinstance(n, FromIndex) and _along(n.index, var) for n in walk_scalar(index))
    return isinstance(index, IndexExpr) and var in free_vars(index)


def _product(count: Index, dtype: DType, chip: Description, made: Tally) -> None:
    name = "i8" if dtype.is_integer else dtype.short
    depth = chip.depth(name)
    assert depth is not None
    made.add(MATRIX, ceildiv(count, chip.matrix_rows * chip.matrix_columns * depth))

