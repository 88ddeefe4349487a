"""What arithmetic of PTX means: floats with their modes, integers, comparisons, choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.base.scalar import Const, Scalar, call, cast, where
from terrazzo.dtypes import float32, float64, int32, int64, uint32
from terrazzo.triton_cpu.frontend.conversions import narrowed
from terrazzo.triton_cpu.frontend.externals_bits import (
    high_product,
    product_of_24_bits,
    sum_of_difference,
)
from terrazzo.triton_cpu.frontend.externals_rounding import rounded
from terrazzo.triton_cpu.frontend.ptx.parse import Instruction
from terrazzo.triton_cpu.frontend.ptx.types import KINDS, SIGNED, UNSIGNED, Kind, as_type

ROUNDINGS = {"rn": "rn", "rz": "rz", "rm": "rd", "rp": "ru"}


@dataclass(frozen=True)
class Form:
    """An instruction taken apart: its types, and all other suffixes."""

    instruction: Instruction
    kinds: tuple[Kind, ...]
    modifiers: frozenset[str]

    @property
    def name(self) -> str:
        return self.instruction.name

    @property
    def kind(self) -> Kind:
        return self.kinds[-1]

    def rounding(self) -> str:
        """The mode of rounding that is asked for, or none."""
        return next((mode for s, mode in ROUNDINGS.items() if s in self.modifiers), "")

    def only(self, *modifiers: str) -> None:
        """Refuse what is not among some modifiers."""
        if not self.modifiers <= {*modifiers, *ROUNDINGS}:
            raise self.instruction.refused()


def form_of(instruction: Instruction) -> Form:
    """Types and modifiers of an instruction."""
    kinds = tuple(KINDS[s] for s in instruction.suffixes if s in KINDS)
    rest = frozenset(s for s in instruction.suffixes if s not in KINDS)
    return Form(instruction, kinds, rest)


Meaning = Callable[..., Scalar]


@dataclass(frozen=True)
class Row:
    """What an instruction computes of one lane, and the types of its operands by name.

    Without names, all operands have the last type of the instruction; `T` stands for that one,
    `first` for the first one and `wide` for the type of a product.
    """

    meaning: Meaning  # of the form and the operands
    takes: tuple[str, ...] = ()


# ---------------------------------------------------------------- floats
def flushed(x: Scalar) -> Scalar:
    """`.ftz`: numbers below the normal ones are zero."""
    if x.dtype is not float32:
        return x
    small = call("lt", call("abs", x), Const(float32, 2.0**-126))
    return where(small, call("copysign", Const(float32, 0.0), x), x)


def saturated(x: Scalar) -> Scalar:
    """`.sat`: between 0 and 1, nan is 0."""
    inside = call("min", call("max", x, Const(x.dtype, 0.0)), Const(x.dtype, 1.0))
    return where(call("isnan", x), Const(x.dtype, 0.0), inside)


def _modes(form: Form, compute: Callable[..., Scalar], args: tuple[Scalar, ...]) -> Scalar:
    """Inputs and results as the suffixes of a float instruction want them."""
    if "ftz" in form.modifiers:
        args = tuple(flushed(a) for a in args)
    result = compute(*args)
    if "ftz" in form.modifiers:
        result = flushed(result)
    if "sat" in form.modifiers:
        result = saturated(result)
    if "relu" in form.modifiers:
        result = relu(result)
    return result


def relu(x: Scalar) -> Scalar:
    """`.relu`: negative numbers are zero, nan stays."""
    return where(call("lt", x, Const(x.dtype, 0.0)), Const(x.dtype, 0.0), x)


_MODES = ("ftz", "sat", "approx", "full")


def _rounded(name: str) -> Callable[[Form], Callable[..., Scalar]]:
    """An operation with its mode of rounding.

    Of halves, f32 holds every result but that of fma exactly enough to be rounded from there.
    """

    def choose(form: Form) -> Callable[..., Scalar]:
        mode = form.rounding()
        if form.kind.dtype.bits >= 32:
            return rounded(name, mode) if mode else _PLAIN[name]
        if mode not in ("", "rn"):
            raise form.instruction.refused()
        return _PLAIN[name] if name != "fma" else lambda *args: narrowed(
            call("fma", *(cast(a, float64) for a in args)), args[0].dtype)

    return choose


_PLAIN: dict[str, Callable[..., Scalar]] = {
    "add": lambda a, b: call("add", a, b), "sub": lambda a, b: call("sub", a, b),
    "mul": lambda a, b: call("mul", a, b), "div": lambda a, b: call("div", a, b),
    "fma": lambda a, b, c: call("fma", a, b, c), "sqrt": lambda a: call("sqrt", a),
    "rcp": lambda a: call("div", Const(a.dtype, 1.0), a),
}


def _float(name: str, *modifiers: str) -> Meaning:
    def meaning(form: Form, *args: Scalar) -> Scalar:
        form.only(*_MODES, *modifiers)
        return _modes(form, _rounded(name)(form), args)

    return meaning


def _approximate(name: str) -> Meaning:
    """An approximate function of a GPU; ours is at least as accurate."""

    def meaning(form: Form, x: Scalar) -> Scalar:
        form.only("approx", "ftz")
        return _modes(form, lambda a: call(name, a), (x,))

    return meaning


def _extreme(name: str) -> Meaning:
    """The number where one side is nan (with `.NaN`, nan); -0 lies below 0."""

    def of_floats(form: Form, a: Scalar, b: Scalar) -> Scalar:
        form.only("ftz", "NaN")
        better = call("lt" if name == "min" else "gt", a, b)
        negative = call("lt", as_type(a, SIGNED[a.dtype.bits]), Const(SIGNED[a.dtype.bits], 0))
        ahead = negative if name == "min" else call("not", negative)
        first = call("or", better, call("and", call("eq", a, b), ahead))
        nan = call("isnan", a if "NaN" in form.modifiers else b)
        nan_b = call("and", call("isnan", b), call("not", call("isnan", a)))
        if "NaN" not in form.modifiers:
            return where(call("or", first, nan), a, b)
        return where(nan_b, b, where(call("or", first, nan), a, b))

    def meaning(form: Form, a: Scalar, b: Scalar) -> Scalar:
        if not a.dtype.is_float:
            form.only()
            return call(name, a, b)
        return _modes(form, lambda x, y: of_floats(form, x, y), (a, b))

    return meaning


def _fma(form: Form, *args: Scalar) -> Scalar:
    if form.kind.dtype.is_float:
        return _float("fma", "relu")(form, *args)
    raise form.instruction.refused()


# ---------------------------------------------------------------- integers
def _integer(form: Form, name: str, a: Scalar, b: Scalar) -> Scalar:
    if "sat" in form.modifiers and a.dtype is int32:
        wide = call(name, cast(a, int64), cast(b, int64))
        return cast(call("min", call("max", wide, Const(int64, -(1 << 31))),
                         Const(int64, (1 << 31) - 1)), int32)
    form.only()
    return call(name, a, b)


def _sum(name: str) -> Meaning:
    def meaning(form: Form, a: Scalar, b: Scalar) -> Scalar:
        if a.dtype.is_float:
            return _float(name)(form, a, b)
        return _integer(form, name, a, b)

    return meaning


def product(form: Form, a: Scalar, b: Scalar) -> Scalar:
    """The lower half of a product of integers, the upper half, or both."""
    form_of_result = form.modifiers & {"lo", "hi", "wide"}
    if form_of_result == {"wide"}:
        wide = (SIGNED if a.dtype.is_signed else UNSIGNED)[a.dtype.bits * 2]
        return call("mul", cast(a, wide), cast(b, wide))
    if form_of_result == {"hi"}:
        if a.dtype.bits >= 32:
            return high_product(a, b)
        wide = int32 if a.dtype.is_signed else uint32
        both = call("mul", cast(a, wide), cast(b, wide))
        return cast(call("shr", both, Const(wide, a.dtype.bits)), a.dtype)
    if form_of_result == {"lo"}:
        return call("mul", a, b)
    raise form.instruction.refused()


def _product(form: Form, a: Scalar, b: Scalar) -> Scalar:
    return _float("mul")(form, a, b) if a.dtype.is_float else product(form, a, b)


def _product_and_sum(form: Form, a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    if a.dtype.is_float:
        return _float("fma")(form, a, b, c)
    return call("add", product(form, a, b), c)


def _quotient(form: Form, a: Scalar, b: Scalar) -> Scalar:
    if a.dtype.is_float:
        return _float("div")(form, a, b)
    return call("floordiv", call("sub", a, call("fmod", a, b)), b)


def _by_type(of_floats: Meaning, of_integers: str) -> Meaning:
    def meaning(form: Form, a: Scalar) -> Scalar:
        return of_floats(form, a) if a.dtype.is_float else call(of_integers, a)

    return meaning


def _sign(name: str) -> Meaning:
    """neg and abs of floats change nothing but the sign, of nan too."""

    def meaning(form: Form, a: Scalar) -> Scalar:
        form.only("ftz")
        bits = UNSIGNED[a.dtype.bits]
        top = Const(bits, 1 << (a.dtype.bits - 1))
        value = as_type(flushed(a) if "ftz" in form.modifiers else a, bits)
        return as_type(call("xor", value, top) if name == "neg" else
                       call("and", value, call("not", top)), a.dtype)

    return meaning


# ---------------------------------------------------------------- comparisons
_COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
            "lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_BOOLEAN = ("and", "or", "xor")


def compared(form: Form, a: Scalar, b: Scalar) -> Scalar:
    """A comparison by its suffix: `equ` and its like hold where a side is nan."""
    if "ftz" in form.modifiers:
        a, b = flushed(a), flushed(b)
    name = next((m for m in form.instruction.suffixes if m in _COMPARE or m in _UNORDERED), None)
    if name is None:
        raise form.instruction.refused()
    if not a.dtype.is_float:
        if name in _COMPARE:
            return call(_COMPARE[name], a, b)
        raise form.instruction.refused()
    unordered = call("or", call("isnan", a), call("isnan", b))
    if name == "nan":
        return unordered
    if name == "num":
        return call("not", unordered)
    if name in _UNORDERED:
        return call("or", unordered, call(name[:-1], a, b))
    found = call(_COMPARE[name], a, b)
    return call("and", found, call("not", unordered)) if name == "ne" else found


_UNORDERED = frozenset({"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"})


def combined(form: Form, found: Scalar, other: Scalar | None) -> Scalar:
    """A comparison with the predicate that it is joined with, if any."""
    name = next((m for m in _BOOLEAN if m in form.modifiers), None)
    if other is None:
        return found
    if name is None:
        raise form.instruction.refused()
    return call(name, found, other)


def _choice(form: Form, a: Scalar, b: Scalar, p: Scalar) -> Scalar:
    return where(p, a, b)


def _choice_by_sign(form: Form, a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    return where(call("ge", c, Const(c.dtype, 0)), a, b)


def _class(form: Form, x: Scalar) -> Scalar:
    """testp: what kind of number a float is."""
    normal = call("and", call("isfinite", x), call(
        "ge", call("abs", x), Const(x.dtype, 2.0**(-126 if x.dtype is float32 else -1022))))
    zero = call("eq", x, Const(x.dtype, 0.0))
    kinds: dict[str, Callable[[], Scalar]] = {
        "finite": lambda: call("isfinite", x), "infinite": lambda: call("isinf", x),
        "notanumber": lambda: call("isnan", x), "number": lambda: call("not", call("isnan", x)),
        "normal": lambda: normal,
        "subnormal": lambda: call("and", call("isfinite", x), call(
            "not", call("or", normal, zero))),
    }
    return kinds[next(iter(form.modifiers))]()


def _logic(name: str) -> Meaning:
    def meaning(form: Form, *args: Scalar) -> Scalar:
        form.only()
        return call(name, *args)

    return meaning


ROWS: dict[str, Row] = {
    "add": Row(_sum("add")), "sub": Row(_sum("sub")), "mul": Row(_product),
    "mad": Row(_product_and_sum, ("T", "T", "wide")), "fma": Row(_fma),
    "div": Row(_quotient), "rem": Row(lambda form, a, b: call("fmod", a, b)),
    "min": Row(_extreme("min")), "max": Row(_extreme("max")),
    "neg": Row(_by_type(_sign("neg"), "neg")), "abs": Row(_by_type(_sign("abs"), "abs")),
    "rcp": Row(_float("rcp")), "sqrt": Row(_float("sqrt")),
    "rsqrt": Row(_approximate("rsqrt")), "ex2": Row(_approximate("exp2")),
    "lg2": Row(_approximate("log2")), "sin": Row(_approximate("sin")),
    "cos": Row(_approximate("cos")), "tanh": Row(_approximate("tanh")),
    "copysign": Row(lambda form, a, b: call("copysign", b, a)),
    "testp": Row(_class),
    "and": Row(_logic("and")), "or": Row(_logic("or")), "xor": Row(_logic("xor")),
    "not": Row(_logic("not")),
    "cnot": Row(lambda form, a: cast(call("eq", a, Const(a.dtype, 0)), a.dtype)),
    "selp": Row(_choice, ("T", "T", "pred")),
    "slct": Row(_choice_by_sign, ("first", "first", "T")),
    "mul24": Row(lambda form, a, b: product_of_24_bits(a, b)),
    "sad": Row(lambda form, a, b, c: cast(
        sum_of_difference(a, b, cast(c, uint32)), a.dtype)),
}
