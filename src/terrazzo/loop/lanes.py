"""How an index moves inside one vector of a loop whose vectors begin at multiples of their width.

Sorting networks read the partner of an element at `i - i % 2`, `i // 4 * 4 + i % 2` and the like:
no steps of one number, but the same ones in every vector. Such loads are whole vectors, shuffled.
"""

from __future__ import annotations

from functools import lru_cache

from terrazzo.index import Index, Var, substitute


@lru_cache(maxsize=4096)
def steps_in_vector(index: Index, var: Var, width: int) -> tuple[int, ...] | None:
    """What each lane adds to the index of the first one, if that is the same in all vectors."""
    start = Var("start", 0) * width
    first = substitute(index, {var: start})
    steps = [substitute(index, {var: start + lane}) - first for lane in range(width)]
    return tuple(s for s in steps if isinstance(s, int)) if all(
        isinstance(s, int) for s in steps) else None


@lru_cache(maxsize=4096)
def lanes_in_vector(index: Index, var: Var, width: int) -> tuple[int, tuple[int, ...]] | None:
    """The first lane's place in the aligned vector that an index reads, and the place of each."""
    steps = steps_in_vector(index, var, width)
    first = substitute(index, {var: Var("start", 0) * width}) % width
    if steps is None or not isinstance(first, int):
        return None
    places = tuple(first + step for step in steps)
    return (first, places) if min(places) >= 0 and max(places) < width else None
