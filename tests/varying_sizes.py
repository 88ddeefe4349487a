"""Operators called with sizes that vary, shrink and grow: symbolic sizes against fixed ones.

    python tests/varying_sizes.py PART PARTS MODE ROWS [NAMES...]

ROWS is "first" (of each operator), "all", "gradients" or "all gradients".

A program of its own, because what it looks for may end the process; `test_varying_sizes.py` runs
it. Every case of `test_every_operator.py` is called with its own sizes and then with others, as
one compiled function; each call must give what tracing for exactly its sizes gives: the values of
the numpy reference, or the same error. Arguments lie at the end of memory, so that code which reads
past them ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import terrazzo as tz
from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import TensorType, operator_named
from terrazzo.graph.trace import trace

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "graph")]

from page_edges import PageEdges  # noqa: E402
from test_every_operator import CASES, ROWS, TOLERANCE, Case, inputs_of  # noqa: E402

Arrays = list[Any]
# Their tables point into each other, and make no sense when they are cut.
TABLES = {"tree_ensemble", "counts_of_ngrams"}
EDGES = PageEdges()


def resized(array: Any, shape: tuple[int, ...]) -> Any:
    """The same elements, repeated or cut off to fill another shape."""
    if array is None or array.shape == shape:
        return array
    return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)


def changed(arrays: Arrays, sizes: dict[int, int]) -> Arrays:
    """Every size replaced; equal sizes stay equal."""
    return [None if a is None else resized(a, tuple(sizes.get(n, n) for n in a.shape))
            for a in arrays]


def variations(arrays: Arrays, rng: np.random.Generator, axes: int) -> Iterator[Arrays]:
    """The given sizes, then larger ones and smaller ones, of all axes together and of one alone."""
    distinct = list(dict.fromkeys(n for a in arrays if a is not None for n in a.shape))
    yield arrays
    if not distinct:
        return
    yield changed(arrays, {n: 2 * n for n in distinct if n > 1})
    if axes > 1:
        yield changed(arrays, {n: n + 2 for n in distinct if n > 1})
    yield changed(arrays, {n: max(n - 1, 2) for n in distinct if n > 1})
    for size in (2, 1, 0):
        yield changed(arrays, {n: size for n in distinct if n > 1})
    places = [(i, d) for i, a in enumerate(arrays) if a is not None for d in range(a.ndim)]
    for i, d in [places[int(rng.integers(len(places)))] for _ in range(axes)]:
        for size in (arrays[i].shape[d] + 1, 2, 3):
            shape = tuple(size if e == d else n for e, n in enumerate(arrays[i].shape))
            yield [resized(a, shape) if j == i else a for j, a in enumerate(arrays)]


def function_of(name: str, row: Case, present: Sequence[bool]) -> Any:
    op = operator_named(name)

    def function(*given: Any) -> Any:
        values = iter(given)
        args = [next(values) if here else None for here in present]
        return row.call(op, *args) if row.call is not None else op(*args, **row.attrs)

    return function


def expected(function: Any, arrays: Arrays, gradient: bool) -> Any:
    """What fixed sizes give: arrays, or an error."""
    types = [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]
    try:
        graph = trace(function, types, name="fixed")[0]
        if gradient:
            graph = vjp_graph(graph)
            weights = [np.ones([int(n) for n in v.shape], v.dtype.np)
                       for v in graph.inputs[len(arrays):]]
            return run(graph, [*arrays, *weights])
        return run(graph, arrays)
    except Exception as error:
        return error


def gradient_of(function: Any) -> Any:
    def pulled(*values: Any) -> Any:
        graph, _ = trace(function, [v.type for v in values])
        back = vjp_graph(graph)
        from terrazzo.graph.rebuild import replace_inputs

        ones = [tz.full(shape=v.type.shape, value=1, dtype=v.dtype)
                for v in back.inputs[len(values):]]
        return tuple(replace_inputs(back, [*values, *ones]))

    return pulled


def flat(result: Any) -> list[Any]:
    return [np.asarray(r) for r in result] if isinstance(result, (tuple, list)) else [
        np.asarray(result)]


def difference(found: Any, wanted: Any) -> str:
    """What is wrong with a result; nothing if nothing is."""
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        if type(found) is not type(wanted):
            return f"{found!r} instead of {wanted!r}"
        if isinstance(wanted, TerrazzoError) and found.message != wanted.message:
            return f"{found.message!r} instead of {wanted.message!r}"
        return ""
    for got, want in zip(flat(found), wanted, strict=True):
        if got.shape != want.shape or as_dtype(got.dtype) is not as_dtype(want.dtype):
            return f"{got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
        if as_dtype(want.dtype).kind not in ("f", "c"):
            if not np.array_equal(got, want):
                return f"{got} instead of {want}"
            continue
        tolerance = 4 * TOLERANCE[as_dtype(want.dtype).real.name]
        largest = float(np.max(np.abs(want), initial=1.0, where=np.isfinite(want)))
        if not np.allclose(got, want, tolerance, tolerance * largest, equal_nan=True):
            return f"{got} instead of {want}"
    return ""


def sweep(name: str, row: Case, mode: str, gradient: bool, axes: int) -> tuple[list[str], int]:
    """What is wrong with the calls of one case, and how often symbolic sizes were compiled for."""
    wrongs = []
    rng = np.random.default_rng(7)
    first = inputs_of(row, rng, "float32")
    present = [a is not None for a in first]
    function = function_of(name, row, present)
    compiled = tz.jit(gradient_of(function) if gradient else function)
    with tz.knobs.override(dynamic=mode):
        for arrays in variations(first, rng, axes):
            given = [a for a in arrays if a is not None]
            wanted = expected(function, given, gradient)
            try:
                found = compiled(*(EDGES.copy(i, a) for i, a in enumerate(given)))
            except Exception as error:  # compared with the one that is expected
                found = error
            wrong = difference(found, wanted)
            if wrong:
                wrongs.append(f"{name} of {[a.shape for a in given]}: {wrong}")
    families = (f for table in compiled.tables.values() for f in table.families.values())
    made = sum(found is not None for f in families for variants in f.variants.values()
               for _, found in variants)
    return wrongs, made


def main() -> int:
    part, parts, mode, rows, *names = sys.argv[1:]
    cases = [p.values for p in CASES
             if p.values[0] not in TABLES and (not names or p.values[0] in names)]
    gradient = rows.endswith("gradients")
    if gradient:
        cases = [(n, r) for n, r in cases if n in ROWS]
    if not rows.startswith("all"):
        cases = list(dict(reversed(cases)).items())[::-1]  # the first row of each operator
    chosen = cases[int(part)::int(parts)]
    failed, symbolic = 0, 0
    for name, row in chosen:
        print(name, flush=True)  # the last line says who ended the process
        wrongs, made = sweep(str(name), row, mode, gradient, 1 if rows == "first" else 2)
        failed, symbolic = failed + len(wrongs), symbolic + (made > 0)
        for wrong in wrongs:
            print("WRONG", wrong, flush=True)
        if not made:
            print("FIXED", name)
    print(f"{len(chosen)} cases swept, {symbolic} with symbolic sizes, {failed} calls wrong")
    return 1 if failed or symbolic < len(chosen) * 3 // 4 else 0


if __name__ == "__main__":
    sys.exit(main())
