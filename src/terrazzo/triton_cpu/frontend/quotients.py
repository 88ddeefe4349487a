"""Quotients and remainders in addresses, where they only name rows and columns.

Generated kernels count through a tensor with one number and take it apart again: element `n` lies
in row `n // 32` and column `n % 32`. Along a tile that begins at a multiple of 32 these are numbers
that go in steps, once its loop is one over rows around one over what is in a row. Read as integer
arithmetic they would make every load a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Scalar, walk
from terrazzo.index import Index, Var, coefficient, free_vars, proves_le
from terrazzo.triton_cpu.frontend.addresses import Reader, conjuncts, distance, replaced

SHORTEST = 16  # elements of a row that are worth a loop of their own
_QUOTIENTS = ("floordiv", "fmod")
Accepts = Callable[[Index], bool]


def has_quotients(roots: Iterable[Scalar]) -> bool:
    """Whether an integer is divided by a number anywhere."""
    return any(_divisor(node) is not None for root in roots for node in walk(root))


def _divisor(node: Scalar) -> int | None:
    if isinstance(node, Call) and node.op in _QUOTIENTS and node.dtype.is_integer and (
            node.dtype.is_signed and node.dtype.bits >= 32 and isinstance(node.args[1], Const)):
        number = int(node.args[1].value)
        return number if number > 0 else None
    return None


class Quotients:
    """Reads quotients as index expressions, where some integers are known not to be negative.

    Without them, all are taken not to be: who reads then only wants to know the form.
    """

    def __init__(self, known: Sequence[Index] | None = ()):
        self.known = None if known is None else list(known)
        self.reader = Reader(None)

    def read(self, root: Scalar, accepts: Accepts) -> Scalar:
        """An expression with the quotients that are accepted as index expressions."""
        table: dict[int, Scalar] = {}
        for node in walk(root):
            index = self.index(node)
            if index is not None and accepts(index):
                table[id(node)] = FromIndex(node.dtype, index)
        return replaced(root, table) if table else root

    def index(self, node: Scalar) -> Index | None:
        """A quotient or remainder as an index expression, None where it is none."""
        divisor = _divisor(node)
        if divisor is None:
            return None
        assert isinstance(node, Call)
        number = self.reader.index(_truncated(node))
        if number is None or not self._not_negative(number):
            return None
        found = number // divisor if node.op == "floordiv" else number % divisor
        self.reader.memo[id(node)] = node, found  # for those that it is part of
        if self.known is not None and not proves_le(0, found):
            self.known.append(found)
        return found

    def _not_negative(self, number: Index) -> bool:
        return self.known is None or proves_le(0, number) or any(
            proves_le(0, number - times * k) for k in self.known for times in _times(k, number))


def _times(part: Index, number: Index) -> set[int]:
    """How often a part may be in a number: once, or as often as some variable that both have."""
    found = {1}
    for var in free_vars(part) & free_vars(number):
        ours, whole = coefficient(part, var), coefficient(number, var)
        if isinstance(ours, int) and isinstance(whole, int) and whole * ours > 0:
            found.add(abs(whole) // abs(ours))
    return found


def _truncated(node: Call) -> Scalar:
    """What is divided: a quotient rounded towards zero is spelled (a - a % b) // b."""
    number, divisor = node.args
    if node.op == "floordiv" and isinstance(number, Call) and number.op == "sub":
        whole, rest = number.args
        if isinstance(rest, Call) and rest.op == "fmod" and rest.args[0] is whole and (
                isinstance(rest.args[1], Const) and isinstance(divisor, Const)
                and rest.args[1].value == divisor.value):
            return whole
    return number


# ---------------------------------------------------------------- expressions of a loop nest
def read_quotients(root: Scalar, mask: Scalar | None, accepts: Accepts,
                   known: Sequence[Index] = ()) -> Scalar:
    """The same for all of an expression, whose masked loads tell more of their addresses.

    Some integers are known not to be negative.
    """
    table: dict[int, Scalar] = {}
    known = [*known, *not_negative(mask)]
    plain = Quotients(known)
    for node in walk(root):
        if isinstance(node, Call) and node.op == "where" and isinstance(node.args[1], Load):
            load = node.args[1]
            address = load.indices[0]
            if isinstance(address, Scalar) and has_quotients((address,)):
                guarded = Quotients([*known, *not_negative(node.args[0])])
                table[id(load)] = Load(load.dtype, load.source, (guarded.read(address, accepts),))
    return plain.read(replaced(root, table) if table else root, accepts)


def not_negative(condition: Scalar | None, holds: bool = True) -> list[Index]:
    """Integers that are not negative where a condition holds, or where it does not."""
    if condition is None:
        return []
    parts = conjuncts(condition)
    if not holds and len(parts) != 1:
        return []  # any of them may be what fails
    apart = [distance(Reader(None).settle(part)) for part in parts]
    return [-1 - negative if holds else negative for negative in apart if negative is not None]


def row_lengths(roots: Iterable[Scalar], ranges: Mapping[Var, int]) -> dict[Var, int]:
    """Into rows of how many elements loops are to be taken apart, so that quotients go in steps."""
    lengths: dict[Var, int] = {}
    reader = Reader(None)
    for node in (node for root in roots for node in walk(root)):
        divisor = _divisor(node)
        if divisor is None:
            continue
        assert isinstance(node, Call)
        number = reader.index(_truncated(node))
        if number is None or isinstance(number, int):
            continue
        for var in free_vars(number) & set(ranges):
            if coefficient(number, var) == 1 and coefficient(number % divisor, var) is None:
                lengths[var] = math.gcd(lengths.get(var, ranges[var]), divisor)
    return lengths


def is_free(value: Scalar, ranges: Mapping[Var, int], foreseen: bool) -> bool:
    """Whether a quotient over a tile needs no division where it is part of an address."""
    quotients = Quotients(None)
    index: Index | None = None
    for node in walk(value):
        index = quotients.index(node)
    if index is None:
        return False
    lengths = row_lengths((value,), ranges)
    return foreseen or all(n >= SHORTEST for n in lengths.values())
