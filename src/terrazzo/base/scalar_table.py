"""The table of scalar operations: to add one, add its row.

What each column says stands in `scalar_op.py`. Operators, gradients, numpy's functions, code of
each chip, Triton's text, torch, ONNX, `te`, `verify` and the fuzzer are made from the rows;
`tests/base/test_scalar_table.py` names what is missing in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base import scalar_accuracy as accuracy
from terrazzo.base import scalar_numpy as meanings
from terrazzo.base.scalar_op import INSTRUCTIONS, Absent, ScalarOp, composed, primitive
from terrazzo.dtypes import DType, bool_

OPS: dict[str, ScalarOp] = {}


def enter(row: ScalarOp) -> None:
    """Add an operation, before any room above is imported: they read the table once."""
    assert row.name not in OPS, f"there is a scalar operation {row.name!r}"
    OPS[row.name] = row


def _row(name: str, numpy_function: Callable[..., Any], doc: str, **columns: Any) -> None:
    enter(primitive(name, numpy_function, doc, **columns))


_DISCRETE = Absent("it has no slope")
_NOT_DEVICE = Absent("Triton has an operator or a word of its own")
_NOT_IN_ONNX = Absent("ONNX has no such operator")

# ---------------------------------------------------------------- arithmetic
_NUMBERS: dict[str, Any] = {
    "kinds": "fiu", "result": "promote", "arity": 2, "libdevice": _NOT_DEVICE}


def _split_ties(f: Any, x: Any, y: Any, z: Any, g: Any) -> Any:
    share = f.where(f.equal(x, y), 0.5 * g, g)
    return f.where(f.equal(x, z), share, 0), f.where(f.equal(y, z), share, 0)


def _power_gradient(f: Any, x: Any, y: Any, z: Any, g: Any) -> Any:
    dx = g * y * f.where(f.equal(y, 0), 0, f.power(x, y - 1))
    dy = g * f.where(f.equal(x, 0), 0, z * f.log(f.where(f.equal(x, 0), 1, x)))
    return dx, dy


_row("add", np.add, "x + y", **_NUMBERS | {"kinds": "fiub"}, infix="+", accuracy=accuracy.SUM,
     commutes=True, gradient=lambda f, x, y, z, g: (g, g), onnx={"fiu": "Add"},
     triton={"fiu": "{0} + {1}", "b": "{0} | {1}"})
_row("sub", np.subtract, "x - y", **_NUMBERS, infix="-", accuracy=accuracy.SUM,
     operator="subtract", gradient=lambda f, x, y, z, g: (g, -g), triton="{0} - {1}", torch="sub",
     onnx="Sub")
_row("mul", np.multiply, "x * y", **_NUMBERS | {"kinds": "fiub"}, infix="*",
     accuracy=accuracy.PRODUCT, commutes=True, operator="multiply",
     gradient=lambda f, x, y, z, g: (g * y, g * x), torch="mul", onnx={"fiu": "Mul"},
     triton={"fiu": "{0} * {1}", "b": "{0} & {1}"})
_row("div", np.true_divide, "x / y; integers give floats",
     **_NUMBERS | {"kinds": "f", "result": "float"}, infix="/", cost=4,
     accuracy=accuracy.QUOTIENT, operator="divide",
     gradient=lambda f, x, y, z, g: (g / y, -g * z / y), triton="{0} / {1}",
     torch="true_divide", onnx="Div")
_row("floordiv", meanings.floor_divide, "x // y, rounded down", **_NUMBERS, infix="//", cost=8,
     accuracy=accuracy.WHOLE_QUOTIENT, decides=True, digits=False, operator="floor_divide",
     gradient=_DISCRETE, ufunc="floor_divide", onnx=_NOT_IN_ONNX,
     triton={"f": "_floor_div_float({0}, {1})", "i": "_floor_div({0}, {1})", "u": "{0} // {1}"})
_row("mod", meanings.remainder, "x % y with the sign of y", **_NUMBERS, infix="%", cost=8,
     accuracy=accuracy.REMAINDER, decides=True, operator="remainder", ufunc="remainder",
     gradient=lambda f, x, y, z, g: (g, -g * f.floor(x / y)), onnx={"iu": "Mod"},
     triton={"fi": "_floor_mod({0}, {1})", "u": "{0} % {1}"})
_row("fmod", np.fmod, "x % y with the sign of x", **_NUMBERS | {"libdevice": "fmod"}, cost=8,
     accuracy=accuracy.C_REMAINDER, decides=True,
     gradient=lambda f, x, y, z, g: (g, -g * f.trunc(x / y)),
     triton={"f": "_fmod({0}, {1})", "iu": "{0} % {1}"},
     onnx=Absent("ONNX has it as an attribute of Mod"))
_row("min", np.minimum, "the smaller; nan wins", **_NUMBERS | {"kinds": "fiub"}, commutes=True,
     accuracy=accuracy.CHOICE, digits=False, operator="minimum", gradient=_split_ties,
     triton={"f": "_min({0}, {1})", "iu": "tl.minimum({0}, {1})", "b": "{0} & {1}"},
     onnx={"fiu": "Min"})
_row("max", np.maximum, "the larger; nan wins", **_NUMBERS | {"kinds": "fiub"}, commutes=True,
     accuracy=accuracy.CHOICE, digits=False, operator="maximum", gradient=_split_ties,
     triton={"f": "_max({0}, {1})", "iu": "tl.maximum({0}, {1})", "b": "{0} | {1}"},
     onnx={"fiu": "Max"})
_row("pow", meanings.power, "x ** y", **_NUMBERS | {"libdevice": "pow"}, infix="**", cost=30,
     accuracy=accuracy.POWER, operator="power", gradient=_power_gradient, ufunc="power",
     cpu=("wide.pow", "double_power.pow"), torch="pow", onnx={"f": "Pow"}, mlir="math.powf",
     triton={"f": "_pow({0}, {1})", "iu": "_pow_int({0}, {1}, {bits})"})
_row("fma", meanings.fma, "x * y + z, rounded once", arity=3, triton="tl.fma({0}, {1}, {2})",
     operator=Absent("compilers make it of a product and a sum"), gradient=_DISCRETE,
     torch=Absent("no operator"), onnx=Absent("no operator"))

# ---------------------------------------------------------------- signs and rounding
_ONE_NUMBER: dict[str, Any] = _NUMBERS | {"arity": 1, "accuracy": accuracy.EXACT}
_ROUNDING: dict[str, Any] = {
    "kinds": "fiu", "accuracy": accuracy.EXACT, "decides": True,
    "gradient": lambda f, x, y, g: 0.0 * g}

_row("neg", np.negative, "-x", **_ONE_NUMBER, operator="negative", triton="-{0}",
     gradient=lambda f, x, y, g: -g, torch="neg", onnx={"fi": "Neg"})
_row("abs", np.absolute, "|x|", **_ONE_NUMBER | {"kinds": "fiub", "libdevice": "abs"},
     operator="absolute", gradient=lambda f, x, y, g: g * f.sign(x), torch="abs",
     triton={"fi": "tl.abs({0})", "ub": "{0}"}, onnx={"fiu": "Abs"})
_row("sign", np.sign, "-1, 0 or 1", **_ONE_NUMBER, cost=2, decides=True, onnx="Sign",
     gradient=lambda f, x, y, g: 0.0 * g,
     triton={"f": "_sign({0})", "u": "({0} > 0).to({type})",
             "i": "({0} > 0).to({type}) - ({0} < 0).to({type})"})
_row("copysign", np.copysign, "x with the sign of y", arity=2, accuracy=accuracy.SIGN,
     mlir="math.copysign",
     digits=False, triton="tl.where(_negative({1}), -tl.abs({0}), tl.abs({0}))",
     onnx=_NOT_IN_ONNX,
     gradient=lambda f, x, y, z, g: (g * f.where(
         f.equal(f.signbit(x), f.signbit(y)), 1.0, -1.0), None))
_row("floor", np.floor, "rounded down", **_ROUNDING, cpu="llvm.floor", onnx={"f": "Floor"},
     mlir="math.floor",
     triton={"f": "tl.floor({0})", "iu": "{0}"})
_row("ceil", np.ceil, "rounded up", **_ROUNDING, cpu="llvm.ceil", onnx={"f": "Ceil"},
     mlir="math.ceil",
     triton={"f": "tl.ceil({0})", "iu": "{0}"})
_row("trunc", np.trunc, "rounded to zero", **_ROUNDING, cpu="llvm.trunc", onnx=_NOT_IN_ONNX,
     mlir="math.trunc",
     triton={"f": "_trunc({0})", "iu": "{0}"})
_row("round", np.rint, "rounded to the nearest, halves to even", **_ROUNDING,
     cpu="llvm.roundeven", libdevice="rint", mlir="math.roundeven", onnx={"f": "Round"},
     triton={"f": "_round({0})", "iu": "{0}"})

# ---------------------------------------------------------------- roots and lengths
_row("sqrt", np.sqrt, "square root", cost=4, accuracy=accuracy.ROUNDED, cpu="llvm.sqrt",
     mlir="math.sqrt",
     gradient=lambda f, x, y, g: 0.5 * g / y, triton="tl.sqrt({0})", onnx="Sqrt")
_row("rsqrt", meanings.rsqrt, "1 / sqrt(x)", cost=6, cpu="double.rsqrt", mlir="math.rsqrt",
     gradient=lambda f, x, y, g: -0.5 * g * y / x, triton="tl.rsqrt({0})",
     onnx=Absent("written as Reciprocal of Sqrt"))
_row("cbrt", np.cbrt, "cube root", cost=15, cpu=("wide.cbrt", "libm.cbrt"), mlir="math.cbrt",
     gradient=lambda f, x, y, g: g / (3.0 * y * y), triton="_cbrt({0})",
     torch=Absent("torch has no cube root"), onnx=_NOT_IN_ONNX)


def _hypot_gradient(f: Any, x: Any, y: Any, z: Any, g: Any) -> Any:
    length = f.where(f.equal(z, 0), 1, z)  # at the origin all slopes of -1..1 are right; take 0
    return g * x / length, g * y / length


_row("hypot", np.hypot, "sqrt(x*x + y*y)", arity=2, cost=8, commutes=True,
     cpu=("wide.hypot", "double_inverse.hypot"), gradient=_hypot_gradient,
     triton="_hypot({0}, {1})", onnx=_NOT_IN_ONNX)
_row("atan2", np.arctan2, "the angle of the point (y, x)", arity=2, cost=20, mlir="math.atan2",
     cpu=("single.atan2", "double_inverse.atan2"), triton="_atan2({0}, {1})", onnx=_NOT_IN_ONNX,
     gradient=lambda f, x, y, z, g: (g * y / (x * x + y * y), -g * x / (x * x + y * y)))


# ---------------------------------------------------------------- elementary functions
def _function(name: str, numpy_function: Callable[..., Any], doc: str, single: str, double: str,
              gradient: Callable[..., Any] | Absent, **columns: Any) -> None:
    """A function that ONNX and MLIR have under its name, written out in Triton; or as told."""
    _row(name, numpy_function, doc, gradient=gradient,
         cpu=(f"{single}.{name}", f"{double}.{name}"),
         **{"cost": 15, "triton": f"_{name}({{0}})", "onnx": name.capitalize(),
            "mlir": f"math.{name}"} | columns)


_ABSENT = {"onnx": _NOT_IN_ONNX}

_function("exp", np.exp, "e ** x", "single", "double", lambda f, x, y, g: g * y,
          triton="tl.exp({0})")
_function("exp2", np.exp2, "2 ** x", "single", "double",
          lambda f, x, y, g: g * y * math.log(2), triton="tl.exp2({0})", **_ABSENT)
_function("expm1", np.expm1, "e ** x - 1, accurate near 0", "wide", "double",
          lambda f, x, y, g: g * (y + 1), **_ABSENT)
_function("log", np.log, "natural logarithm", "single", "double", lambda f, x, y, g: g / x,
          triton="tl.log({0})")
_function("log2", np.log2, "logarithm of base 2", "wide", "double",
          lambda f, x, y, g: g / (x * math.log(2)), triton="tl.log2({0})", **_ABSENT)
_function("log10", np.log10, "logarithm of base 10", "wide", "double",
          lambda f, x, y, g: g / (x * math.log(10)),
          triton="tl.log2({0}) * 0.3010299956639812", **_ABSENT)
_function("log1p", np.log1p, "log(1 + x), accurate near 0", "wide", "double",
          lambda f, x, y, g: g / (1 + x), **_ABSENT)
_function("sin", np.sin, "sine", "single", "double", lambda f, x, y, g: g * f.cos(x),
          accuracy=accuracy.WAVE, triton="tl.sin({0})")
_function("cos", np.cos, "cosine", "single", "double", lambda f, x, y, g: -g * f.sin(x),
          accuracy=accuracy.WAVE, triton="tl.cos({0})")
_function("tan", np.tan, "tangent", "wide", "double", lambda f, x, y, g: g * (1 + y * y),
          accuracy=accuracy.TANGENT)
_function("asin", np.arcsin, "inverse sine", "single", "double_inverse",
          lambda f, x, y, g: g * f.rsqrt(1 - x * x))
_function("acos", np.arccos, "inverse cosine", "single", "double_inverse",
          lambda f, x, y, g: -g * f.rsqrt(1 - x * x))
_function("atan", np.arctan, "inverse tangent", "single", "double_inverse",
          lambda f, x, y, g: g / (1 + x * x))
_function("sinh", np.sinh, "hyperbolic sine", "wide", "double_power",
          lambda f, x, y, g: g * f.cosh(x))
_function("cosh", np.cosh, "hyperbolic cosine", "wide", "double_power",
          lambda f, x, y, g: g * f.sinh(x))
_function("tanh", np.tanh, "hyperbolic tangent", "single", "double",
          lambda f, x, y, g: g * (1 - y * y))
_function("asinh", np.arcsinh, "inverse hyperbolic sine", "wide", "double_inverse",
          lambda f, x, y, g: g * f.rsqrt(x * x + 1))
_function("acosh", np.arccosh, "inverse hyperbolic cosine", "wide", "double_inverse",
          lambda f, x, y, g: g * f.rsqrt(x * x - 1))
_function("atanh", np.arctanh, "inverse hyperbolic tangent", "wide", "double_inverse",
          lambda f, x, y, g: g / (1 - x * x))
_function("sigmoid", meanings.sigmoid, "1 / (1 + exp(-x))", "single", "double",
          lambda f, x, y, g: g * y * (1 - y), cost=12, accuracy=accuracy.SIGMOID,
          triton="tl.sigmoid({0})", libdevice=Absent("the library has none"),
          mlir=Absent("the math dialect has none"))

_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
_function("erf", meanings.each(math.erf), "error function", "single", "double",
          lambda f, x, y, g: g * (_TWO_OVER_ROOT_PI * f.exp(-x * x)), cost=20,
          triton="tl.erf({0})")
_function("erfc", meanings.each(math.erfc), "1 - erf(x)", "wide", "libm",
          lambda f, x, y, g: -g * (_TWO_OVER_ROOT_PI * f.exp(-x * x)), cost=20,
          accuracy=accuracy.TAIL, **_ABSENT)
_row("erfinv", meanings.each(meanings.erfinv), "inverse of erf", cost=20, accuracy=accuracy.TAIL,
     gradient=lambda f, x, y, g: g * (f.exp(y * y) / _TWO_OVER_ROOT_PI),
     cpu=("special.erfinv", "special.erfinv_double"), triton="_erfinv({0})", onnx=_NOT_IN_ONNX)
_row("lgamma", meanings.each(meanings.lgamma), "log of |gamma(x)|", cost=20,
     accuracy=accuracy.GAMMA, gradient=lambda f, x, y, g: g * f.digamma(x),
     cpu=("special.lgamma", "libm.lgamma"), triton="_lgamma({0})", onnx=_NOT_IN_ONNX)
_row("digamma", meanings.each(meanings.digamma), "derivative of lgamma", cost=20,
     accuracy=accuracy.GAMMA, gradient=Absent("the trigamma function is not here"),
     cpu=("special.digamma", "special.digamma_double"), triton="_digamma({0})",
     libdevice=Absent("the library has none"), onnx=_NOT_IN_ONNX)


# Functions that generated code calls from the C library, element by element.
def _of_the_library(name: str, doc: str, arity: int = 1, **columns: Any) -> None:
    _row(name, meanings.libm(name, arity), doc, arity=arity, cost=40, cpu=f"libm.{name}",
         operator=Absent("only kernels of Triton call it"), gradient=Absent("no operator"),
         triton=Absent("Triton has it in its libraries alone"), torch=Absent("no operator"),
         onnx=_NOT_IN_ONNX, **columns)


_of_the_library("j0", "Bessel function of the first kind, order 0")
_of_the_library("j1", "Bessel function of the first kind, order 1")
_of_the_library("y0", "Bessel function of the second kind, order 0")
_of_the_library("y1", "Bessel function of the second kind, order 1")
_ORDER = Absent("there the order is an integer beside a float")
_of_the_library("jn", "Bessel function of the first kind, order x", 2, libdevice=_ORDER)
_of_the_library("yn", "Bessel function of the second kind, order x", 2, libdevice=_ORDER)
_of_the_library("tgamma", "gamma(x)")
_of_the_library("remainder", "x - y * the whole number nearest to x / y", 2)

# ---------------------------------------------------------------- comparison, logic, bits
_COMPARISON: dict[str, Any] = {
    "arity": 2, "kinds": "fiub", "result": "bool", "accuracy": accuracy.EXACT, "decides": True,
    "gradient": _DISCRETE, "libdevice": _NOT_DEVICE}
_TEST: dict[str, Any] = _COMPARISON | {"arity": 1, "decides": False}
_BITS: dict[str, Any] = {
    "arity": 2, "kinds": "iub", "result": "bits", "gradient": _DISCRETE,
    "libdevice": _NOT_DEVICE}

_row("eq", np.equal, "x == y", **_COMPARISON, infix="==", commutes=True, operator="equal",
     triton="{0} == {1}", torch="eq", onnx="Equal")
_row("ne", np.not_equal, "x != y", **_COMPARISON, infix="!=", commutes=True,
     operator="not_equal", triton="{0} != {1}", torch="ne", onnx=_NOT_IN_ONNX)
_row("lt", np.less, "x < y", **_COMPARISON, infix="<", operator="less", triton="{0} < {1}",
     torch="lt", onnx={"fiu": "Less"})
_row("le", np.less_equal, "x <= y", **_COMPARISON, infix="<=", operator="less_equal",
     triton="{0} <= {1}", torch="le", onnx={"fiu": "LessOrEqual"})
_row("gt", np.greater, "x > y", **_COMPARISON, infix=">", operator="greater",
     triton="{0} > {1}", torch="gt", onnx={"fiu": "Greater"})
_row("ge", np.greater_equal, "x >= y", **_COMPARISON, infix=">=", operator="greater_equal",
     triton="{0} >= {1}", torch="ge", onnx={"fiu": "GreaterOrEqual"})
_row("isnan", np.isnan, "whether x is nan", **_TEST, triton="{0} != {0}", onnx={"f": "IsNaN"})
_row("isinf", np.isinf, "whether x is infinite", **_TEST, onnx={"f": "IsInf"},
     triton={"f": 'tl.abs({0}) == float("inf")', "iub": "{0} != {0}"})
_row("isfinite", np.isfinite, "whether x is neither nan nor infinite", **_TEST, onnx=_NOT_IN_ONNX,
     triton={"f": 'tl.abs({0}) < float("inf")', "iub": "{0} == {0}"})
_row("and", np.bitwise_and, "x & y", **_BITS, infix="&", commutes=True, operator="bitwise_and",
     triton="{0} & {1}", onnx={"b": "And", "iu": "BitwiseAnd"})
_row("or", np.bitwise_or, "x | y", **_BITS, infix="|", commutes=True, operator="bitwise_or",
     triton="{0} | {1}", onnx={"b": "Or", "iu": "BitwiseOr"})
_row("xor", np.bitwise_xor, "x ^ y", **_BITS, infix="^", commutes=True, operator="bitwise_xor",
     triton="{0} ^ {1}", onnx={"b": "Xor", "iu": "BitwiseXor"})
_row("not", np.invert, "~x", **_BITS | {"arity": 1}, operator="bitwise_invert", triton="~{0}",
     torch="bitwise_not", onnx={"b": "Not", "iu": "BitwiseNot"})
_DIRECTED = Absent("ONNX has it as an attribute of BitShift")
_row("shl", meanings.shift_left, "x << y", **_BITS | {"kinds": "iu"}, infix="<<",
     operator="bitwise_left_shift", ufunc="left_shift", triton="_shift_left({0}, {1}, {bits})",
     onnx=_DIRECTED)
_row("shr", meanings.shift_right, "x >> y", **_BITS | {"kinds": "iu"}, infix=">>",
     operator="bitwise_right_shift", ufunc="right_shift", onnx=_DIRECTED,
     triton={"i": "_shift_right({0}, {1}, {bits})", "u": "_shift_right_unsigned({0}, {1}, {bits})"})

# ---------------------------------------------------------------- choosing and converting
_WRITTEN: dict[str, Any] = {
    "kinds": "fiub", "result": "promote", "written": True, "libdevice": _NOT_DEVICE,
    "gradient": Absent("its operator is written out")}
_row("where", np.where, "x where the condition holds, else y", **_WRITTEN, arity=3,
     accuracy=accuracy.EXACT, triton="tl.where({0}, {1}, {2})", onnx="Where")
_row("cast", meanings.same, "x converted to another type", **_WRITTEN, operator="astype",
     accuracy=accuracy.Accuracy(1.0, counts=True), triton="{0}.to({type})",
     torch=Absent("a method, with the type"), onnx=Absent("written as Cast, with the type"))
_row("bitcast", meanings.same, "the bits of x read as another type of the same width", **_WRITTEN,
     triton="{0}.to({type}, bitcast=True)", torch=Absent("a method, with the type"),
     onnx=Absent("older than opset 26, ONNX has none"))


# ---------------------------------------------------------------- made of those above
def _composed(name: str, meaning: Callable[..., Any], doc: str, **columns: Any) -> None:
    enter(composed(name, meaning, OPS, doc, ufunc=name, torch=name, **columns))


_LOGIC: dict[str, Any] = {"kinds": "fiub", "result": "bool", "arity": 2, "commutes": True}
_composed("logical_and", lambda op, x, y: op("and", op("ne", x, 0), op("ne", y, 0)),
          "x and y, as truth values", **_LOGIC)
_composed("logical_or", lambda op, x, y: op("or", op("ne", x, 0), op("ne", y, 0)),
          "x or y, as truth values", **_LOGIC)
_composed("logical_xor", lambda op, x, y: op("xor", op("ne", x, 0), op("ne", y, 0)),
          "either x or y, as truth values", **_LOGIC)
_composed("logical_not", lambda op, x: op("eq", x, 0), "not x, as a truth value",
          kinds="fiub", result="bool")
_composed("signbit", lambda op, x: op("lt", op("copysign", 1.0, x), 0.0),
          "whether the sign of x is negative, also for -0.0", result="bool")
_composed("square", lambda op, x: op("mul", x, x), "x * x", kinds="fiub", result="promote")
_composed("reciprocal", lambda op, x: op("div", 1, x), "1 / x; integers give floats",
          onnx="Reciprocal")


def by_operator() -> Mapping[str, ScalarOp]:
    """The rows that have operators, by the names of those."""
    return {row.operator: row for row in OPS.values() if isinstance(row.operator, str)}


# ---------------------------------------------------------------- reductions
class Reduction(NamedTuple):
    """An associative operation with its identity, as used by Reduce and by reducing stores."""

    op: str
    numpy: Callable[..., Any]
    identity: Callable[[DType], Any]


def lowest(dtype: DType) -> Any:
    """The value that never wins a maximum."""
    if dtype.is_float:
        return -np.inf
    return False if dtype is bool_ else int(np.iinfo(dtype.np).min)


def highest(dtype: DType) -> Any:
    """The value that never wins a minimum."""
    if dtype.is_float:
        return np.inf
    return True if dtype is bool_ else int(np.iinfo(dtype.np).max)


REDUCTIONS: dict[str, Reduction] = {
    "add": Reduction("add", np.add.reduce, lambda t: 0),
    "mul": Reduction("mul", np.multiply.reduce, lambda t: 1),
    "max": Reduction("max", np.maximum.reduce, lowest),
    "min": Reduction("min", np.minimum.reduce, highest),
    "and": Reduction("and", np.bitwise_and.reduce, lambda t: True if t is bool_ else -1),
    "or": Reduction("or", np.bitwise_or.reduce, lambda t: False if t is bool_ else 0),
}
__all__ = ["INSTRUCTIONS", "OPS", "REDUCTIONS", "Absent", "Reduction", "ScalarOp", "by_operator",
           "enter", "highest", "lowest"]
