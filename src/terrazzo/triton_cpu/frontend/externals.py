"""Functions that kernels call by name: the table of libdevice, made of scalar operations.

A row is a name, the types it takes and gives, and what computes it. Types are letters (LETTERS):
"si:s" takes a float32 and an int32 and gives a float32. `libdevice` makes Triton's functions from
this table; `external` is the rule that lowering uses. Symbols of CUDA's and AMD's libraries
(`__nv_expf`, `__ocml_exp_f32`) are understood too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from terrazzo.base.scalar import Call, Const, Scalar, call, cast, where
from terrazzo.base.scalar_table import OPS
from terrazzo.dtypes import (
    DType,
    bfloat16,
    bool_,
    float16,
    float32,
    float64,
    int32,
    int64,
    uint32,
    uint64,
)
from terrazzo.errors import UnsupportedOperator
from terrazzo.triton_cpu.frontend import externals_bits as bits
from terrazzo.triton_cpu.frontend import externals_special as special
from terrazzo.triton_cpu.frontend.conversions import (
    NEAREST,
    TOWARDS_ZERO,
    bits_of,
    from_e4b15,
    narrowed,
    to_e4b15,
)
from terrazzo.triton_cpu.frontend.externals_rounding import (
    MODES,
    TO_NEAREST,
    float_of,
    integer_of,
    next_after,
    rounded,
)
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import dtype_of

Rule = Callable[..., Scalar]
LETTERS: dict[str, DType] = {
    "h": float16, "t": bfloat16, "s": float32, "d": float64, "i": int32, "u": uint32,
    "l": int64, "m": uint64, "b": bool_,
}
FLOATS = "sdht"
PREFIX = "tz_"


def _op(name: str) -> Rule:
    return lambda *args: call(name, *args)


def _zero(x: Scalar) -> Const:
    return Const(x.dtype, 0.0)


def _exp10(x: Scalar) -> Scalar:
    return call("pow", Const(x.dtype.compute, 10.0), x)


def _reciprocal(name: str) -> Rule:
    def rule(*args: Scalar) -> Scalar:
        return call("div", Const(float64, 1.0), special.wide(call(name, *args)))

    return rule


def _round_away(x: Scalar) -> Scalar:
    """To the nearest integer, halves away from zero."""
    whole = call("trunc", x)
    half = call("ge", call("abs", call("sub", x, whole)), Const(x.dtype, 0.5))
    away = call("add", whole, call("copysign", Const(x.dtype, 1.0), x))
    return call("copysign", where(half, away, whole), x)


def _positive_difference(x: Scalar, y: Scalar) -> Scalar:
    return where(call("le", x, y), _zero(x), call("sub", x, y))


def _saturated(x: Scalar) -> Scalar:
    inside = call("min", call("max", x, _zero(x)), Const(x.dtype, 1.0))
    return where(call("isnan", x), _zero(x), inside)


def _sign_bit(x: Scalar) -> Scalar:
    code = bits_of(x)
    return cast(call("lt", code, Const(code.dtype, 0)), int32)


def _as(target: DType) -> Rule:
    return lambda x: x if x.dtype is target else Call(target, "bitcast", (x,))


def _high_word_of_reciprocal(x: Scalar) -> Scalar:
    code = call("and", bits_of(call("div", Const(float64, 1.0), x)), Const(int64, -(1 << 32)))
    return Call(float64, "bitcast", (code,))


def _high_word(x: Scalar) -> Scalar:
    return cast(call("shr", bits_of(x), Const(int64, 32)), int32)


def _from_words(high: Scalar, low: Scalar) -> Scalar:
    word = cast(cast(low, uint32), int64)
    code = call("or", call("shl", cast(high, int64), Const(int64, 32)), word)
    return Call(float64, "bitcast", (code,))


# ---------------------------------------------------------------- the table
def _of_the_table(arity: int) -> dict[str, Rule]:
    """The scalar operations that the library has."""
    return {row.libdevice: _op(row.name) for row in OPS.values()
            if row.arity == arity and isinstance(row.libdevice, str)}


_FLOAT_FUNCTIONS: dict[int, dict[str, Rule]] = {
    1: {
        **_of_the_table(1),
        "nearbyint": _op("round"), "fabs": _op("abs"), "round": _round_away,
        "exp10": _exp10, "rcbrt": _reciprocal("cbrt"),
        "sinpi": special.sinpi, "cospi": special.cospi, "erfcx": special.erfcx,
        "erfcinv": special.erfcinv, "normcdf": special.normcdf,
        "normcdfinv": special.normcdfinv, "logb": special.logb,
        "cyl_bessel_i0": lambda x: special.cyl_bessel_i(0, x),
        "cyl_bessel_i1": lambda x: special.cyl_bessel_i(1, x),
    },
    2: {
        **_of_the_table(2),
        "rhypot": _reciprocal("hypot"), "fdim": _positive_difference, "nextafter": next_after,
    },
    3: {**_of_the_table(3), "norm3d": special.norm, "rnorm3d": special.reciprocal_norm},
    4: {"norm4d": special.norm, "rnorm4d": special.reciprocal_norm},
}
# CUDA's fast variants; ours are no less accurate than the plain ones.
_FAST: dict[str, Rule] = {
    **{f"fast_{name}f": _op(name) for name in (
        "sin", "cos", "tan", "exp", "log", "log2", "log10", "tanh")},
    "fast_exp10f": _exp10,
}
_OF_HALF_BITS = frozenset({"nextafter"})  # steps between neighbours of the type itself


def _rows() -> Iterator[tuple[str, str, Rule]]:
    for arity, functions in _FLOAT_FUNCTIONS.items():
        for name, rule in functions.items():
            for letter in "sd" if name in _OF_HALF_BITS else FLOATS:
                yield name, f"{letter * arity}:{letter}", rule
    for name, rule in _FAST.items():
        yield name, "s:s", rule
    yield "fast_powf", "ss:s", _op("pow")
    yield "fast_dividef", "ss:s", _op("div")
    yield "saturatef", "s:s", _saturated
    yield "rsqrt_rn", "s:s", _reciprocal_root
    for letter in FLOATS:
        for name in ("isnan", "isinf"):
            yield name, f"{letter}:b", _op(name)
        yield "signbit", f"{letter}:i", _sign_bit
        yield "ilogb", f"{letter}:i", special.ilogb
        yield "llrint", f"{letter}:l", lambda x: cast(call("round", x), int64)
        yield "llround", f"{letter}:l", lambda x: cast(_round_away(x), int64)
        for name in ("ldexp", "scalbn"):
            yield name, f"{letter}i:{letter}", special.ldexp
        yield "pow", f"{letter}i:{letter}", special.power_of_integer
        for name in ("jn", "yn"):
            yield name, f"i{letter}:{letter}", _op(name)
    yield "finitef", "s:b", _op("isfinite")
    yield "isfinited", "d:b", _op("isfinite")
    yield from _integer_rows()
    yield from _rounding_rows()
    for name, source, target in (
            ("int_as_float", "i", "s"), ("uint_as_float", "u", "s"), ("float_as_int", "s", "i"),
            ("float_as_uint", "s", "i"), ("longlong_as_double", "l", "d"),
            ("double_as_longlong", "d", "l")):
        yield name, f"{source}:{target}", _as(LETTERS[target])
    yield "rcp64h", "d:d", _high_word_of_reciprocal
    yield "hiloint2double", "ii:d", _from_words
    yield "double2hiint", "d:i", _high_word
    yield "double2loint", "d:i", lambda x: cast(bits_of(x), int32)


def _reciprocal_root(x: Scalar) -> Scalar:
    return call("div", Const(float64, 1.0), call("sqrt", special.wide(x)))


def _integer_rows() -> Iterator[tuple[str, str, Rule]]:
    for letter in "il":
        yield "abs", f"{letter}:{letter}", _op("abs")
        yield "brev", f"{letter}:{letter}", bits.reversed_bits
        yield "popc", f"{letter}:i", bits.count_ones
        yield "clz", f"{letter}:i", bits.leading_zeros
        yield "ffs", f"{letter}:i", bits.first_one
    for letter in "iulm":
        yield "mulhi", f"{letter * 2}:{letter}", bits.high_product
    for letter in "iu":
        yield "mul24", f"{letter * 2}:{letter}", bits.product_of_24_bits
        yield "sad", f"{letter * 2}u:{letter}", bits.sum_of_difference
        yield "hadd", f"{letter * 2}:{letter}", lambda x, y: bits.average(x, y, 0)
        yield "rhadd", f"{letter * 2}:{letter}", lambda x, y: bits.average(x, y, 1)
    yield "byte_perm", "iii:i", bits.permuted_bytes


def _rounding_rows() -> Iterator[tuple[str, str, Rule]]:
    arity = {"rcp": 1, "sqrt": 1, "fma": 3}
    integers = {"int": "i", "uint": "u", "ll": "l", "ull": "m"}
    for mode in MODES:
        for name in TO_NEAREST:
            for letter in "sd":
                yield (f"{name}_{mode}", f"{letter * arity.get(name, 2)}:{letter}",
                       rounded(name, mode))
        yield f"double2float_{mode}", "d:s", float_of(float32, mode)
        for floating, letter in (("float", "s"), ("double", "d")):
            for integer, other in integers.items():
                yield (f"{floating}2{integer}_{mode}", f"{letter}:{other.replace('u', 'i')}",
                       integer_of(LETTERS[other], mode))
                yield (f"{integer}2{floating}_{mode}", f"{other}:{letter}",
                       float_of(LETTERS[letter], mode))


def _table() -> dict[str, dict[str, Rule]]:
    table: dict[str, dict[str, Rule]] = {}
    for name, signature, rule in _rows():
        table.setdefault(name, {})[signature] = rule
    return table


FUNCTIONS: dict[str, dict[str, Rule]] = _table()
# Casts of fp8e4b15, which the front end calls like functions.
_CASTS: dict[str, Rule] = {
    "from_e4b15": from_e4b15,
    "to_e4b15_rtne": lambda x: to_e4b15(x, NEAREST),
    "to_e4b15_rtz": lambda x: to_e4b15(x, TOWARDS_ZERO),
}


# ---------------------------------------------------------------- finding a function by its symbol
_IRREGULAR = {"mul64hi": "mulhi", "umul64hi": "umulhi", "powi": "pow", "powif": "pow",
              "fast_fdividef": "fast_dividef", "llabs": "abs"}


def symbol_of(name: str, signature: str) -> str:
    """What `external` finds a row of the table by."""
    return f"{PREFIX}{name}.{signature}"


def _of_others(symbol: str, args: list[Scalar]) -> tuple[str, str] | None:
    """The row that a symbol of CUDA's libdevice or AMD's ocml means, for arguments of a type."""
    name = re.sub(r"^__ocml_|_f(32|64)$", "", symbol).removeprefix("__nv_")
    name = _IRREGULAR.get(name, name)
    # __nv_expf, __nv_popcll, __nv_fadd_rn, __nv_dadd_rn, __nv_fmaf_rn, __nv_umulhi
    spellings = (name, name[:-1], name[:-2], name[1:], name.replace("fmaf", "fma"))
    for spelling in spellings:
        for signature in FUNCTIONS.get(spelling, {}):
            unsigned = name.startswith("u") and spelling == name[1:]
            wanted = [LETTERS[c] for c in signature.split(":")[0]]
            given = [_UNSIGNED.get(a.dtype, a.dtype) if unsigned else a.dtype for a in args]
            if wanted == given:
                return spelling, signature
    return None


_UNSIGNED = {int32: uint32, int64: uint64}


def external(op: Op, args: list[Scalar]) -> Scalar:
    """The rule of tt.extern_elementwise."""
    symbol = str(op.attrs.get("symbol", ""))
    result = dtype_of(op.type.elem)
    own = symbol.removeprefix(PREFIX)
    if own in _CASTS:
        return _CASTS[own](args[0])
    name, _, signature = own.partition(".")
    if signature not in FUNCTIONS.get(name, {}):
        found = _of_others(symbol, args)
        if found is None:
            raise UnsupportedOperator(
                f"the external function {symbol!r} is not there on the CPU for arguments of "
                f"{', '.join(a.dtype.name for a in args)}",
                hint="use a function of triton.language.extra.libdevice")
        name, signature = found
    rule = FUNCTIONS[name][signature]
    takes, gives = signature.split(":")
    value = rule(*(cast(a, LETTERS[c]) for a, c in zip(args, takes, strict=True)))
    if value.dtype is float64 and LETTERS[gives].is_float:
        value = narrowed(value, LETTERS[gives])
    return cast(cast(value, LETTERS[gives]), result)
