"""What symbolic sizes cost: the same operator compiled for fixed sizes and for sizes that vary.

    python benchmarks/symbolic.py                         # all rows, one and two threads
    python benchmarks/symbolic.py --only 'pool|depthwise' --threads 1 --forms image

Every form of a row is one function that was compiled once, for sizes that differ from call to
call: those of the batch, of the image (height and width, or the length of a sequence), or all of
them with the channels, for each number of which convolutions and pools are compiled. It is then
called with several sizes, and compared at each of them with a function that was compiled for
exactly that one. Samples alternate; times are the least of each; a row shows the largest ratio
over its sizes, symbolic over fixed: at 1.2 fixed sizes are 1.2 times as fast.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import terrazzo as tz

ROUNDS = 15
SAMPLE_SECONDS = 1e-3
ENOUGH = 1.2  # rows above are measured again, and listed by name
REPEATS = 3

Sizes = dict[str, int]
Shapes = Callable[..., tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Kind:
    """An operator, the shapes of its arguments by sizes, and what sizes vary in each form."""

    name: str
    function: Callable[..., Any]
    shapes: Shapes
    sizes: Sizes
    others: tuple[Sizes, ...]  # what each size may be else; only those of a form are changed
    forms: dict[str, tuple[str, ...]]
    by_channels: bool = False  # compiled for each number of channels


IMAGE_FORMS = {"batch": ("n",), "image": ("h", "w"), "all": ("n", "h", "w", "c", "o")}
ROW_FORMS = {"batch": ("n",), "image": ("m",), "all": ("n", "m", "c", "o")}


def image(name: str, function: Callable[..., Any], shapes: Shapes, c: int, h: int, o: int = 0
          ) -> Kind:
    """An operator on images of c channels; o are the channels of the result, if not c."""
    sizes = {"n": 2, "h": h, "w": h, "c": c, "o": o or c}
    others = ({"n": 3, "h": h // 2 + 1, "w": h - 3, "c": 2 * c, "o": 2 * (o or c)},
              {"n": 5, "h": h - 1, "w": h // 2, "c": c + 8, "o": (o or c) + 8})
    return Kind(name, function, shapes, sizes, others, IMAGE_FORMS, True)


def pooled(name: str, op: Any, window: int, stride: int, padding: int) -> Kind:
    """A pool over images as they come."""
    return image(f"{name} {window}x{window}/{stride}", lambda x: op(
        x, window=window, strides=stride, padding=padding), lambda n, h, w, c, o: ((n, c, h, w),),
        32, 56)


def depthwise(window: int, stride: int) -> Kind:
    """One window a channel; groups are channels, so those are fixed."""
    c = 64
    made = image(f"depthwise {window}x{window}/{stride}", lambda x, k: tz.conv(
        x, k, strides=stride, padding=window // 2, groups=c),
        lambda n, h, w, c, o: ((n, c, h, w), (c, 1, window, window)), c, 40)
    return Kind(made.name, made.function, made.shapes, made.sizes, made.others,
                {**IMAGE_FORMS, "all": ("n", "h", "w")})


def dense(window: int, stride: int, c: int, o: int, h: int) -> Kind:
    """A convolution over all channels."""
    return image(f"conv {window}x{window}/{stride}", lambda x, k: tz.conv(
        x, k, strides=stride, padding=window // 2),
        lambda n, h, w, c, o: ((n, c, h, w), (o, c, window, window)), c, h, o)


def rows(name: str, function: Callable[..., Any], shapes: Shapes, m: int, c: int, n: int = 2,
         forms: dict[str, tuple[str, ...]] = ROW_FORMS) -> Kind:
    """An operator on sequences: n of them, of m rows of c elements."""
    return Kind(name, function, shapes, {"n": n, "m": m, "c": c, "o": c},
                ({"n": n + 1, "m": m // 2 + 5, "c": c + 16, "o": c + 32},
                 {"n": n + 3, "m": m - 3, "c": c // 2, "o": c}), forms)


def attention(q: Any, k: Any, v: Any) -> Any:
    """As written by its users."""
    return tz.scaled_dot_product_attention(q, k, v)


def kinds() -> list[Kind]:
    """All operators that are compared."""
    return [
        pooled("max_pool", tz.max_pool, 2, 2, 0),
        pooled("max_pool", tz.max_pool, 3, 2, 1),
        pooled("avg_pool", tz.average_pool, 2, 2, 0),
        pooled("avg_pool", tz.average_pool, 3, 2, 1),
        *(depthwise(window, stride) for window in (3, 7) for stride in (1, 2)),
        dense(1, 1, 64, 64, 28), dense(3, 1, 32, 32, 28), dense(3, 2, 32, 64, 28),
        dense(7, 2, 3, 32, 64),
        rows("softmax", lambda x: tz.softmax(x), lambda n, m, c, o: ((n, m, c),),
             64, 192),
        rows("layer norm", lambda x, g, b: tz.layer_norm(x, g, b),
             lambda n, m, c, o: ((n, m, c), (c,), (c,)), 64, 192),
        rows("matmul", lambda x, w: tz.matmul(x, w), lambda n, m, c, o: ((n, m, c), (c, o)),
             48, 192),
        rows("attention", attention, lambda n, m, c, o: ((n, 4, m, 64),) * 3, 128, 64,
             forms={"batch": ("n",), "image": ("m",), "all": ("n", "m")}),
    ]


# ---------------------------------------------------------------- measuring
def sizes_of(kind: Kind, form: str) -> Iterator[Sizes]:
    """The sizes that a form is called with: each of its sizes varied, the others as they are."""
    for other in (kind.others[0], kind.sizes, *kind.others[1:]):
        yield {**kind.sizes, **{name: other[name] for name in kind.forms[form]}}


def arrays(kind: Kind, sizes: Sizes, seed: int = 0) -> list[np.ndarray]:
    """Arguments of the operator, the same for the same sizes."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in kind.shapes(**sizes)]


def compilations(function: Any) -> int:
    """How many executables for sizes that vary a function has by now."""
    families = function.table.families.values()
    return sum(found is not None for f in families for vs in f.variants.values()
               for _, found in vs)


def ratios(kind: Kind, form: str) -> list[tuple[Sizes, float, float]]:
    """Seconds a call of fixed and of symbolic sizes, for each of a form's sizes."""
    varying = tz.jit(kind.function)
    first, *later = sizes_of(kind, form)
    for sizes in (first, *later):  # the first sizes have code of their own, and are not measured
        varying(*arrays(kind, sizes))
    result = []
    for sizes in later:
        given = arrays(kind, sizes)
        fixed = tz.jit(kind.function)
        np.testing.assert_allclose(varying(*given), fixed(*given), rtol=2e-4, atol=2e-4)
        best = [float("inf")] * 2
        for _ in range(REPEATS):
            best = list(map(min, best, best_times([
                lambda f=f, g=given: f(*g) for f in (fixed, varying)])))
            if best[1] <= ENOUGH * best[0]:
                break  # else it may have been disturbed
        result.append((sizes, *best))
    assert compilations(varying) <= (len(later) if kind.by_channels and form == "all" else 1)
    return result


def best_times(functions: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds a call, the least over rounds in which the functions take turns."""
    best = [float("inf")] * len(functions)
    start = time.perf_counter()
    functions[0]()
    repeats = max(1, int(SAMPLE_SECONDS / (time.perf_counter() - start)))
    for _ in range(ROUNDS):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / repeats)
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a row: microseconds of the largest ratio, and that ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="REGEX", default="", help="operators by name")
    parser.add_argument("--forms", default="batch,image,all", help="some of them, with commas")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    given = parser.parse_args(arguments)
    above: list[str] = []
    for threads in map(int, given.threads.split(",")):
        tz.knobs.threads = threads
        print(f"{threads} thread{'s' * (threads > 1)}: fixed us, symbolic us, ratio")
        for kind in kinds():
            if not re.search(given.only, kind.name):
                continue
            cells = []
            for form in given.forms.split(","):
                found = ratios(kind, form)
                _, fixed, varying = max(found, key=lambda r: r[2] / r[1])
                cells.append(f"{form} {fixed * 1e6:8.1f} {varying * 1e6:8.1f} "
                             f"{varying / fixed:5.2f}")
                if varying > ENOUGH * fixed:
                    above.append(f"{kind.name}, {form}, {threads}: {varying / fixed:.2f}")
            print(f"{kind.name:16} " + "   ".join(cells), flush=True)
    print(f"above {ENOUGH}: {len(above) or 'none'}")
    for line in above:
        print(f"- {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
