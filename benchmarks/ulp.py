"""Measures how far the vector maths is from exact: the largest error in ulp of every f32 function.

    python benchmarks/ulp.py                        # 2^26 inputs a function, this machine's code
    python benchmarks/ulp.py --generic --log2-inputs 22 --functions exp,tanh --json errors.json

Half of the inputs are spread evenly over all bit patterns (all exponents, denormals, infinities,
nans); half lie densely where the function does something. Results that differ from the reference
in being nan, in being infinite, or in the sign of a zero count as an infinite error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.builder import Builder, Module, Val, bundle, vec
from terrazzo.chips.cpu.llvm.jit import compile_object, load_object
from terrazzo.chips.cpu.llvm.vmath import FUNCTIONS, emit

Array = NDArray[np.floating]
CHUNK = 1 << 20
_ELEM = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


@dataclass(frozen=True)
class Worst:
    """The largest error found for a function, and where."""

    function: str
    ulp: float
    at: tuple[float, ...]
    got: float
    exact: float
    inputs: int


# -- references, all in f64 ------------------------------------------------------------------------


def _each(function: Callable[[float], float]) -> Callable[[Array], Array]:
    def at(x: float) -> float:
        try:
            return function(x)
        except (ValueError, OverflowError):  # a pole of lgamma, or beyond f64
            return math.inf

    return np.vectorize(at, otypes=[np.float64])


def _torch(name: str) -> Callable[[Array], Array]:
    def reference(x: Array) -> Array:
        import torch

        result: Array = getattr(torch.special, name)(torch.from_numpy(x)).numpy()
        return result

    return reference


def _sigmoid(x: Array) -> Array:
    return np.where(x < 0, np.exp(-np.abs(x)), 1.0) / (1.0 + np.exp(-np.abs(x)))


REFERENCES: dict[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in FUNCTIONS if hasattr(np, name)},
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "pow": np.power,
    "round": np.rint,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "erf": _each(math.erf),
    "erfc": _each(math.erfc),
    "lgamma": _each(math.lgamma),
    "erfinv": _torch("erfinv"),
    "digamma": _torch("digamma"),
}
NEEDS_TORCH = ("erfinv", "digamma")

# Where a function does something, for the dense half of the inputs.
RANGES: dict[str, tuple[tuple[float, float], ...]] = {
    "exp": ((-104, 89), (-1, 1)),
    "exp2": ((-150, 128), (-1, 1)),
    "expm1": ((-20, 89), (-1, 1)),
    "sinh": ((-90, 90), (-1, 1)),
    "cosh": ((-90, 90), (-1, 1)),
    "tanh": ((-10, 10), (-1, 1)),
    "sigmoid": ((-104, 20), (-4, 4)),
    "log": ((0, 4), (0.5, 2)),
    "log2": ((0, 4), (0.5, 2)),
    "log10": ((0, 4), (0.5, 2)),
    "log1p": ((-1, 4), (-0.5, 1)),
    "sin": ((-70000, 70000), (-7, 7)),
    "cos": ((-70000, 70000), (-7, 7)),
    "tan": ((-70000, 70000), (-7, 7)),
    "erf": ((-5, 5), (-1, 1)),
    "erfc": ((-5, 10.5), (-1, 1)),
    "acosh": ((1, 10), (1, 1.1)),
    "digamma": ((-10, 20), (0.5, 2)),
    "lgamma": ((-10, 20), (0.5, 3)),
    "pow": ((-4, 4), (0.9, 1.1)),
}
_EVERYWHERE = ((-1, 1), (-10, 10))


def inputs(name: str, count: int, seed: int = 0) -> Iterator[tuple[Array, ...]]:
    """Chunks of f32 operands, `count` in all."""
    rng = np.random.default_rng(seed)
    arity = FUNCTIONS[name].arity
    chunks = max(1, count // CHUNK)
    size = count // chunks
    for chunk in range(chunks):
        operands = []
        for position in range(arity):
            # Every stretch of bit patterns once, at a random place in it.
            stretch = (1 << 32) / (size // 2 * chunks)
            index = np.arange(size // 2) * chunks + chunk
            spread = ((index + rng.random(size // 2)) * stretch).astype(np.uint32)
            first, second = RANGES.get(name, _EVERYWHERE)
            dense = np.concatenate(
                [rng.uniform(*first, size // 4), rng.uniform(*second, size - size // 2 - size // 4)]
            )
            operand = np.concatenate([spread.view(np.float32), dense.astype(np.float32)])
            operands.append(operand if position == 0 else rng.permutation(operand))
        if name == "pow":
            # Exponents that bring results of any base into the range of f32.
            x, y = operands
            with np.errstate(all="ignore"):
                reach = rng.uniform(-150, 130, size) / np.log2(np.abs(x.astype(np.float64)))
            some = np.isfinite(reach) & (rng.random(size) < 0.5)
            y[some] = reach[some]
            whole = np.isfinite(y) & (rng.random(size) < 0.25)
            y[whole] = np.trunc(y[whole])
        specials = _specials(arity)
        for operand, special in zip(operands, specials):
            operand[: len(special)] = special
        yield tuple(operands)


def _specials(arity: int) -> tuple[Array, ...]:
    values = [0.0, 0.5, 1.0, 2.0, 3.0, 10.0, 1e-45, 1e-40, 2.0**-126, 1 - 2.0**-24, 3.4e38, 65536.0]
    values += [1 + 2.0**-23, math.inf, math.nan]
    signed = np.array([sign * value for value in values for sign in (1, -1)], np.float32)
    grid = np.meshgrid(*[signed] * arity)
    return tuple(axis.ravel() for axis in grid)


def compile_function(
    name: str, dtype: type = np.float32, lanes: int = 16, count: int = 2, generic: bool = False
) -> Callable[..., Array]:
    """A function over whole arrays, in bundles of `count` vectors of `lanes` lanes."""
    chip = host()
    elem = _ELEM[np.dtype(dtype)]
    module = Module(frozenset() if generic else chip.features)
    arity = FUNCTIONS[name].arity
    params = [("ptr", f"x{i}") for i in range(arity)] + [("ptr", "y"), ("i64", "n")]
    b = Builder(module, "apply", params)
    *sources, target, size = b.params
    ty = vec(elem, lanes)

    def body(i: Val, _: list[Val]) -> None:
        def at(base: Val) -> Val:
            return bundle([b.gep(elem, base, b.add(i, lanes * part)) for part in range(count)])

        operands = [b.load(ty, at(source), 4) for source in sources]
        b.store(emit(b, name, operands), at(target), 4)

    b.loop(0, size, lanes * count, body)
    b.ret()
    library = load_object(compile_object(module.text(), chip), exports=["apply"])
    pointers = [ctypes.c_void_p] * (arity + 1)
    native = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_int64)(library.address("apply"))
    step = lanes * count

    def apply(*operands: Array) -> Array:
        # `library` stays alive as long as this closure does.
        assert library is not None
        length = operands[0].size
        padded = [
            np.concatenate([operand, np.zeros(-length % step, dtype)]).astype(dtype, copy=False)
            for operand in operands
        ]
        result = np.empty_like(padded[0])
        native(*(array.ctypes.data for array in (*padded, result)), result.size)
        return result[:length]

    return apply


def errors_in_ulp(got: Array, exact: Array) -> Array:
    """The distance of f32 results from exact f64 ones, in units of the last place of f32."""
    limit = 2.0**128
    # Beyond f32, infinity is the right result: compare against the first number that is not f32.
    bounded = np.clip(exact, -limit, limit)
    value = np.clip(got.astype(np.float64), -limit, limit)
    exponent = np.clip(np.frexp(bounded)[1], -125, 128)
    error = np.abs(value - bounded) / np.ldexp(1.0, exponent - 24)
    wrong = (np.isnan(got) != np.isnan(exact)) | (np.isinf(exact) & (got != exact))
    wrong |= (exact == 0) & ((got != 0) | (np.signbit(got) != np.signbit(exact)))
    error = np.where(np.isnan(got) & np.isnan(exact), 0.0, error)
    return np.where(wrong, np.inf, error)


def worst_error(name: str, count: int, apply: Callable[..., Array]) -> Worst:
    """Runs a compiled function over many inputs and finds its largest error."""
    worst = Worst(name, -1.0, (), math.nan, math.nan, 0)
    done = 0
    for operands in inputs(name, count):
        with np.errstate(all="ignore"):
            exact = REFERENCES[name](*(operand.astype(np.float64) for operand in operands))
            got = apply(*operands)
            errors = errors_in_ulp(got, exact)
        done += errors.size
        i = int(np.argmax(errors))
        if errors[i] > worst.ulp:
            at = tuple(float(operand[i]) for operand in operands)
            worst = Worst(name, float(errors[i]), at, float(got[i]), float(exact[i]), 0)
    return Worst(name, worst.ulp, worst.at, worst.got, worst.exact, done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--log2-inputs", type=int, default=26, metavar="N")
    parser.add_argument("--functions", default=",".join(FUNCTIONS), help="comma-separated names")
    parser.add_argument("--lanes", type=int, default=0, help="default: as wide as the processor")
    parser.add_argument("--generic", action="store_true", help="no processor-specific instructions")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    lanes = options.lanes or host().vector_bits // 32
    results = []
    code = "generic" if options.generic else host().name
    print(f"{code}, {lanes} lanes, f32, 2^{options.log2_inputs} inputs a function")
    print(f"{'function':10} {'max ulp':>8}  {'at':40} {'seconds':>7}")
    for name in options.functions.split(","):
        if name in NEEDS_TORCH and find_spec("torch") is None:
            print(f"{name:10} {'-':>8}  its reference needs PyTorch")
            continue
        start = time.perf_counter()
        apply = compile_function(name, lanes=lanes, generic=options.generic)
        worst = worst_error(name, 1 << options.log2_inputs, apply)
        results.append(worst)
        at = ", ".join(f"{x:.9g}" for x in worst.at)
        print(f"{name:10} {worst.ulp:8.3f}  {at:40} {time.perf_counter() - start:7.1f}", flush=True)
    if options.json:
        rows = [asdict(worst) for worst in results]
        options.json.write_text(json.dumps({"code": code, "lanes": lanes, "rows": rows}, indent=1))
    if any(math.isinf(worst.ulp) for worst in results):
        sys.exit("some results differ from the reference in kind (nan, infinity, sign of zero)")


if __name__ == "__main__":
    main()
